"""Speech features and frame labels: synthesis, storage, partition into blocks, tf.data."""
