"""Runs to and from the files of others.

``export_run`` writes a ``selection`` of a run: ``export_native``, ``export_layout`` and
``export_hdf5`` say what a file will hold (``exported_file``, ``variable_tensor``),
`trajstore.formats` writes it; ``export_zarr`` makes another run, ``to_torch`` tensors;
``upgrade_run`` makes a run of the present format of an older one. ``token_annotations`` reads what
a file tells of the tokens of a run that is there.

``import_file`` makes runs of a file. ``roles`` is the table of what arrays can be, by names, types
and dimensions; ``recognition`` finds out what the arrays of a file are, with ``number_reading`` and
``tied_matrices``; ``overrules`` is what its
user says of them; ``import_arrays`` makes runs of them: ``run_parts`` says which arrays each has,
and ``run_reading`` puts it together, with ``import_limits``, ``step_labels``, ``row_alignment``,
``token_tables``, ``file_numbers`` and ``learning_rates``, to what ``imported_file`` describes;
``import_native`` reads trajstore's own; ``understanding`` is the way from a path to that. What both
ways share is in ``key_names`` and ``layouts``.

Another name for an array is an entry in ``roles``; another layout that exports offer one in
``layouts``.
"""
