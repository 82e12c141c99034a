"""Plain Keras models of speech frames; nothing here depends on distributed training."""
