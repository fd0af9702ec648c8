"""Commands of the command line that train models.

``annotate``
    The command that tells a run about its tokens afterwards: annotate.
``configuration``
    Options that make the configuration of a training, and that configuration.
``fetch``
    The command `fetch`.
``plan``
    The command `plan`.
``presets``
    The command `presets`.
``record``
    The command `record`.
``recording_progress``
    Progress of a recording.
``sweep``
    The command that records many runs: sweep.
``sweep_view``
    What `trajstore sweep` shows: its runs while they are trained, and what became of each.
``swept_record``
    `trajstore record` as a sweep starts it: it stops when its standard input ends.
``what_if``
    Commands that carry a run out differently: what-if.
"""
