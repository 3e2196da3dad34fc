"""Where the program starts, also as ``python -m pilotfish``: Ctrl-C ends it with status 130, whatever it was doing.

It does not know any command. The one trick: it imports nothing before it is ready to be interrupted.
"""


def main() -> None:
    """The command line, to its end."""
    import gc

    # Imports make a million objects that stay: looking through them for garbage again and again is a fifth of a start.
    gc.set_threshold(50_000, 20, 100)
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
