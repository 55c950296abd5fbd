"""Strict reading of YAML and JSON."""

import pytest

from sparsify.documents import read_document, read_text
from sparsify.errors import UsageError


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="p.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def test_yaml_and_json_give_the_same(write):
    yaml = write("a: 1\nb: [x, 2.5, true, null]\n")
    json = write('{"a": 1, "b": ["x", 2.5, true, null]}', "p.json")
    expected = {"a": 1, "b": ["x", 2.5, True, None]}
    assert read_document(yaml, "policy") == read_document(json, "policy") == expected


@pytest.mark.parametrize(
    "text",
    ["1:30", "on", "yes", "017", "1_000", "0x10", "2024-01-01", "-3:"],
)
def test_yaml_surprises_stay_text(write, text):
    path = write(f'a: "{text}"\n' if text.endswith(":") else f"a: {text}\n")
    assert read_document(path, "policy") == {"a": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-3", -3), ("0", 0), ("1e3", 1000.0), ("2.", 2.0), (".5", 0.5), ("~", None)],
)
def test_yaml_numbers(write, text, value):
    found = read_document(write(f"a: {text}\n"), "policy")["a"]
    assert found == value and type(found) is type(value)


def test_byte_order_mark_is_removed(write):
    assert read_document(write(b"\xef\xbb\xbfa: 1\n"), "policy") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "name", "parts"),
    [
        ("", "p.yaml", ["is empty"]),
        (" \n\n", "p.json", ["is empty"]),
        ("# only a comment\n", "p.yaml", ["null", "expected fields and values"]),
        ("- a\n", "p.yaml", ["list"]),
        ("text", "p.yaml", ["text"]),
        ("12", "p.json", ["number"]),
        ("a: 1\na: 2\n", "p.yaml", ["line 2", "'a'", "twice"]),
        ("a: {b: 1, b: 2}\n", "p.yaml", ["line 1", "'b'", "twice"]),
        ('{"a": 1, "a": 2}', "p.json", ["'a'", "twice"]),
        ("a: [1\nb: 2\n", "p.yaml", ["line 2"]),
        ("a: -3:\n", "p.yaml", ["line 1", "quotes"]),
        ("\ta: 1\n", "p.yaml", ["line 1"]),
        ("a: 1\n---\nb: 1\n", "p.yaml", ["line 2"]),
        ("a: *b\n", "p.yaml", ["line 1", "alias"]),
        ("[a]: 1\n", "p.yaml", ["field name"]),
        ("? {x: 1}\n: 1\n", "p.yaml", ["field name"]),
        ("a: !!python/object/apply:os.system [ls]\n", "p.yaml", ["line 1", "python"]),
        ('{"a": 1,}', "p.json", ["line 1"]),
        ('{"a\n', "p.json", ["line 1, column 4: Invalid control character."]),
        ('{"a": ' + "9" * 5000 + "}", "p.json", ["malformed"]),
        ("[" * 50_000, "p.json", ["nested too deeply"]),
        ("[" * 50_000, "p.yaml", ["p.yaml"]),
        (b"\xff\xfe\x00", "p.yaml", ["UTF-8", "byte 0"]),
        (b"a: \x00\n", "p.yaml", ["malformed"]),
        (b"a" * ((1 << 20) + 1), "p.yaml", ["bytes"]),
    ],
)
def test_faults_are_one_sentence_with_a_place(write, content, name, parts):
    path = write(content, name)
    with pytest.raises(UsageError) as caught:
        read_document(path, "policy")
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 400
    assert all(part in message for part in parts), message


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UsageError, match="There is no policy"):
        read_document(tmp_path / "none.yaml", "policy")
    with pytest.raises(UsageError, match="is a folder"):
        read_text(tmp_path, "prompts file")


def test_aliases_do_not_explode(write):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert len(read_document(write("\n".join(lines)), "policy")) == 12
