"""Plain Keras models of speech frames; distribution is no concern of theirs."""
