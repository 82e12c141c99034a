"""Differences between programs, as pages show them."""


def before(after: str, diff: str) -> str:
    """Undoes a difference, whose parts are at places that only one line `...` separates.

    Each part must be in `after`, once, and after the part before it.
    """
    done, rest = "", after
    for part in diff.split("...\n"):
        lines = part.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in " " + sign) for sign in "-+")
        assert rest.count(new) == 1, f"{rest.count(new)} times:\n{new}"
        head, rest = rest.split(new)
        done += head + old
    return done + rest
