"""Programs for the documentation: its site, the parts that are made from the code, its pictures."""
