"""What the whole suite shares: how tests are spread over processes, and what keeps them quick.

With `pytest -n 2 --dist loadfile` a file runs in one process, so that what it builds is built once;
files of `tests/interpreted`, which are processes of their own, go to whichever is free. What takes
longest starts first.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest

ALONE = "test_interpreted.py::"


def _rank(item: pytest.Item, slow: set[object]) -> int:
    if ALONE in item.nodeid:
        return 0 if item.get_closest_marker("slow") else 1
    return 2 if item.path in slow else 3


@pytest.hookimpl(trylast=True)  # else the order stays random
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (_rank(item, slow), -tests[item.path]))


def pytest_collection_finish() -> None:
    """Libraries stay in memory: looking through them for garbage took a quarter of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return nodeid if ALONE in nodeid else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return LongestFirst(config, log)
