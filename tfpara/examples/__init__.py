"""Programs to run and to read, on data that they make up.

    tfpara-launch -n 2 -- python -m tfpara.examples.classify    fit, callbacks, averages, export
    tfpara-launch -n 2 -- python -m tfpara.examples.loop        a training loop of one's own

Without the launcher each runs in one process. `--help` shows what they take.
"""
