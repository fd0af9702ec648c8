"""Runs to and from the files of others.

``export_run`` writes a ``selection`` of a run: ``export_native``, ``export_notebook`` and
``export_hdf5`` say what a file will hold (``exported_file``, ``variable_tensor``),
`trajstore.formats` writes it; ``export_zarr`` makes another run, ``to_torch`` tensors;
``upgrade_run`` makes a run of the present format of an older one.
``import_file`` makes a run of a file, when ``file_recognition`` has said which it is, and
``import_native``, ``import_notebook`` and ``import_hdf5`` what it holds (``imported_file``,
``dead_tokens``, ``step_labels``). What both ways share is in ``key_names`` and
``notebook_layouts``.

Another file format is one new pair of modules for the two ways, and a line in ``export_run`` and in
``file_recognition``; another layout of safetensors files an entry in ``notebook_layouts``.
"""
