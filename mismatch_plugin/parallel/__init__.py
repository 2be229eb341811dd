"""Ring 2: the same maths with explicit process groups: vocabulary shards, context-parallel partials, the step."""
