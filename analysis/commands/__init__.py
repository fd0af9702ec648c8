"""Commands of the command line that analyze runs.

``analyze``
    The command `analyze`.
``compare``
    The command `compare`.
``explore``
    The command `explore`, which shows a run in a browser.
``plot``
    The command `plot`, which draws figures of one run or several.
``report``
    The command `report`.
``step_options``
    Options about steps: which are shown, and how many without motion are rest.
``summary``
    The command `summary`.
"""
