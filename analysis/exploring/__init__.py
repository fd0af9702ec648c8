"""A page on which a run is explored in a browser (the extra "explore").

What is shown is apart from how: ``run_history`` reads what has to be held of a run, and what is new
of one that grows; ``tokens`` finds a token and tells of it; ``live_run``
keeps them up to date while the run is recorded. None of these knows of a browser. ``plots`` draws
them with HoloViews, ``page`` is a session with its widgets, and ``server`` lets
it be seen.
"""
