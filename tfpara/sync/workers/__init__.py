"""What workers tell each other from Python."""
