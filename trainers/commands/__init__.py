"""Commands of the command line that train models, or prepare, label or recompute a training.

``annotate``
    The command `annotate`, which labels the tokens of a recorded run.
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
    The command `sweep`, which records many runs.
``sweep_view``
    What `sweep` shows: the status of each run.
``swept_record``
    `trajstore record` as a sweep starts it: it stops when its standard input ends.
``what_if``
    The command `what-if`, which applies recorded gradients with other settings.
"""
