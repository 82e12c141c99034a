"""The strategy's side towards Keras."""
