"""Who reads which data, and how far."""
