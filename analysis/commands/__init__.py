"""Commands of the command line that analyze runs.

``analyze``
    The command `analyze`.
``compare``
    The command `compare`.
``explore``
    The command that shows a run in a browser: explore.
``plot``
    Commands that draw a run, and write a page about it: plot, report.
``report``
    The command `report`.
``summary``
    The command `summary`.
"""
