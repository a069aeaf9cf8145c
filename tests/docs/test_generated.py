"""What is made from the declarations is committed as it is made now."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_no_generated_file_is_stale():
    command = [sys.executable, "-X", "utf8", "docs/generate", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_knows_every_key_of_the_shipped_file():
    schema = json.loads((ROOT / "population.schema.json").read_text())
    text = (ROOT / "population.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=population.schema.json\n")

    def resolved(node):
        return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def check(node, value, path):
        if not isinstance(value, dict):
            return
        node = resolved(node)
        branches = [resolved(b) for b in node.get("anyOf") or node.get("oneOf") or [node]]
        for key, inner in value.items():
            places = [b["properties"][key] for b in branches if key in b.get("properties", {})]
            rest = [b.get("additionalProperties") for b in branches]
            places += [place for place in rest if isinstance(place, dict)]
            assert places, f"{path}.{key}"
            check(places[0], inner, f"{path}.{key}")

    check(schema, yaml.safe_load(text), "")
