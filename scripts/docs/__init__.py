"""The documentation: its site, what is made of the code for it, and its pictures."""
