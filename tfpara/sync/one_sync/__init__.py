"""One sync, from the reports to the commit."""
