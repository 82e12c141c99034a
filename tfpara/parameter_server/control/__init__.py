"""How the processes of an asynchronous run know of each other, come, fail and end."""
