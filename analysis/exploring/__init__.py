"""A page that explores a run in a browser (extra `explore`).

``run_history`` reads a run, and the new rows of a growing run. ``tokens`` finds a token and
describes it. ``live_run`` updates both while the run is recorded. These modules import no browser
library. ``plots`` draws with HoloViews, ``page`` has the widgets of one session, and ``server``
serves it.
"""
