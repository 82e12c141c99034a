"""The division of data among workers, and the position in them."""
