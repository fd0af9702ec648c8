"""Commands that train models, and that prepare, label or recompute a training run.

``annotate``
    The command `annotate`, which labels the tokens of a recorded run.
``checkout``
    The command `checkout`, which writes the model of a recorded step to a folder.
``configuration``
    Options that set the configuration of a training run.
``evaluate``
    The command `evaluate`, which calls a function with the model of many steps.
``fetch``
    The command `fetch`, which downloads a corpus or tokenizer.
``model_options``
    Options of the commands that rebuild recorded models.
``plan``
    The command `plan`, which computes the cost of a recording.
``presets``
    The command `presets`, which lists the presets.
``record``
    The command `record`, which trains a model and records every step.
``recording_progress``
    Progress of a recording.
``sweep``
    The command `sweep`, which records many runs.
``sweep_view``
    The display of `sweep`: the status of each run.
``swept_record``
    `trajstore record` as a sweep starts it: it stops when its standard input ends.
``what_if``
    The command `what-if`, which applies recorded gradients with other settings.
"""
