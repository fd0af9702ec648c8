"""Commands that analyze runs.

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
    Options that choose vectors, and the number of unchanged steps of a frozen token.
``summary``
    The command `summary`.
"""
