"""A page that explores a run in a browser (extra `explore`).

``run_history`` reads a run. ``tokens`` finds a token and describes it. ``live_run`` reads a
growing run again. These modules import no browser
library. ``plots`` draws with HoloViews, ``page`` has the widgets of one session, and ``server``
serves it.
"""
