"""The strategy's side towards TensorFlow."""
