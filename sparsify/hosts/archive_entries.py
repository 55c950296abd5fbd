"""Which entries a program's archive may have: none that torch would unpickle, or run as code.

torch.export reads weights and constants as plain bytes where their table says so, and unpickles
them otherwise; it also unpickles example inputs and archives of older formats, and loads compiled
libraries. Archives of this package hold none of these, so every other entry is refused unread.
"""

from __future__ import annotations

import io
import json
import re
import zipfile

import torch

from sparsify.errors import ArtefactError

__all__ = ["check_entries"]

TABLES = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
EXAMPLES = "data/sample_inputs/model.pt"
KNOWN = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|models/model\.json|extra/sparsify\.json"
    r"|archive_format|archive_version|byteorder|version|\.data/\w+"
)


def check_entries(data: bytes, name: str) -> None:
    """Refuse an archive that torch would not read as plain data.

    The entries are listed by the reader that torch itself uses, so that both see the same.

    Raises:
        ArtefactError: an entry is unknown, or pickled.
    """
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    for entry in reader.get_all_records():
        known = entry in (*TABLES, EXAMPLES) or KNOWN.fullmatch(entry)
        if not known or (entry == EXAMPLES and reader.get_record(entry)):
            raise _refused(name, entry)
    for table in TABLES:
        for fqn, facts in json.loads(reader.get_record(table))["config"].items():
            if facts["use_pickle"] is not False:
                raise _refused(name, fqn)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if "version" in archive.namelist():  # how torch knows archives of its older format
            raise _refused(name, "version")


def _refused(name: str, entry: str) -> ArtefactError:
    return ArtefactError(
        f"{name} holds {entry}, which could run code when it is read.",
        "Write the folder again with `sparsify rewrite`.",
    )
