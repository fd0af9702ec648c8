"""Commands that train models, and that prepare, label or recompute a training run.

``annotate``
    The command `annotate`, which labels the tokens of a recorded run.
``checkout``
    The command `checkout`, which writes the model of a recorded step to a folder.
``configuration``
    Options that set the configuration of a training run.
``dry_run``
    What `record --dry-run` prints.
``evaluate``
    The command `evaluate`, which calls a function with the model of many steps.
``fetch``
    The command `fetch`, which downloads a corpus or tokenizer.
``model_options``
    Options of the commands that rebuild recorded models.
``presets``
    The command `presets`, which lists the presets.
``record``
    The command `record`, which trains a model and records every step.
``recording_progress``
    Progress of a recording.
``what_if``
    The command `what-if`, which applies recorded gradients with other settings.
"""
