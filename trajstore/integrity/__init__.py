"""What may be wrong with a run, and what can be done about it.

``verify`` checks a run, ``repair`` carries out what ``repair_plan`` decides. Each finding is a
``problem``. ``damaged_shards`` finds what is broken in a shard, and fills it with NaN;
``replacement`` decides which arrays and chunks a repair gives up instead of rows.

A new check goes where its files are read:

- metadata: ``metadata_checks``, with ``array_json_checks``, ``duplicate_metadata`` and
  ``root_attribute_checks``; the result is ``checked_metadata``
- coordinates: ``coordinate_checks``
- variables: ``array_checks``, of which ``chunk_checks`` reads every chunk against its checksum and
  label
- whether all of it is what was committed: ``fingerprint_checks``
- checkpoints: ``checkpoint_checks``; files that belong to nothing: ``leftovers``
"""
