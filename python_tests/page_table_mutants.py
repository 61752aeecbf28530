"""Planted faults for the page table: proof that the random walk of cache_walk.py would notice.

Run as a script: every fault is compiled into one copy of csrc/page_table.cpp, chosen by number when
the library is loaded; each runs in a forked child, because a broken table may crash or hang, and
must fail the walk. Fault 0 is none and must pass it.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from cache_walk import CacheWalk
from random_cache_walk import random_step

from wim_ext import _native

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SECONDS_PER_FAULT = 60
NUM_WALKS = 16

# Expression of page_table.cpp -> {what the fault does: expression in its place}.
FAULTS: dict[str, dict[str, str]] = {
    "++refcounts_[page] == 2": {"fork takes no reference": "false"},
    "drop_pages(sequence, pages_for(length))": {
        "rollback drops the page it cuts": "drop_pages(sequence, length / page_size_)",
        "rollback keeps a page too many": "drop_pages(sequence, pages_for(length) + 1)",
    },
    "(member ? other.draft_length : other.length) > writer.length": {
        "a shared page is never copied": "false",
        "a shared page is always copied": "true",
        "copies when nobody sees the slot": "other.length >= writer.length",
        "copies one token too late": "other.length > writer.length + 1",
        "two writers of one call stay in a page": "other.length > writer.length",
    },
    "member ? other.draft_moved : members_only": {
        "a holder that moved away still counts": "!member && members_only",
        "can_ever_fit counts strangers": "member && other.draft_moved",
    },
    "sequence.generation + 1": {"a dead handle comes back to life": "sequence.generation"},
    "demand.pages > free": {
        "full one page too early": "demand.pages >= free",
        "full one page too late": "demand.pages > free + 1",
    },
    "demand.pages += demand.copies": {"copies are not counted": "demand.pages += 0"},
    "length < 0": {"rollback to a negative length": "false"},
    "length > sequence.length": {"rollback beyond the length": "false"},
    "shared > source.length": {"fork beyond the length": "shared > source.length + 1"},
    "trunk.length != branch.fork_length": {"commit away from the fork": "false"},
    "branch.severed == Severed::kTrunk": {"commit after the trunk was cut": "false"},
    "branch.severed == Severed::kBranch": {"commit after the branch was cut": "false"},
    "sequence.children > 0": {"a single fork is not cut off": "sequence.children > 1"},
    "child.fork_length > length": {"a fork at the cut is cut off": "child.fork_length >= length"},
    "retire(branch)": {"commit leaves the branch": "(void)0"},
    "left == 0": {"a shared page is freed": "left <= 1", "a page is never freed": "false"},
    "--refcounts_[last] == 1": {"a copy keeps the old reference": "false"},
    "position % page_size_": {"slots are shifted": "(position + 1) % page_size_"},
    "out.position_ids[token] = position++": {
        "positions begin at the chunk": "(out.position_ids[token] = token, position++)"
    },
    "sequence.draft == draft_": {"a sequence twice in one call": "false"},
    "out.copy_src.push_back(row[held - 1])": {"copies page 0": "out.copy_src.push_back(0)"},
    "sequence.length - line.count": {"cancel does nothing": "sequence.length"},
    "at(line.sequence).changed != reservation.epoch": {"cancel takes whatever is there": "false"},
    "length < sequence.length": {"cancel does not notice a cut": "false"},
    "branch.length > trunk.length": {"cancel does not notice a commit": "false"},
    "reservation.work[i].count > 0": {"cancel does not notice growth": "false"},
    "std::max(high_water_pages_, stats().used_pages)": {
        "the high water is the present": "stats().used_pages"
    },
}
# What check_integrity says of books that a fault has broken.
BROKEN_BOOKS = {
    "fork takes no reference": "page table: page 0 has 2 holders but a count of 1",
    "rollback keeps a page too many": r"page table: sequence \d+ of 3 tokens holds 2 pages",
    "a shared page is freed": "page table: free page 1 is held or free twice",
    "a page is never freed": "page table: 1 held and 5 free pages are not 8",
    "a copy keeps the old reference": "page table: page 1 has 1 holders but a count of 2",
}
NAMES = ["none", *(name for group in FAULTS.values() for name in group)]


def mutated_source() -> str:
    """page_table.cpp with every listed expression replaced by a choice."""
    source = (CSRC / "page_table.cpp").read_text()
    number = 0
    for anchor, group in FAULTS.items():
        assert source.count(anchor) == 1, f"{anchor!r} stands {source.count(anchor)} times"
        choice = anchor
        for replacement in group.values():
            number += 1
            choice = f"(planted_fault == {number} ? ({replacement}) : ({choice}))"
        source = source.replace(anchor, choice)
    chooser = (
        '#include <cstdlib>\nstatic const int planted_fault = atoi(getenv("PLANTED_FAULT"));\n'
    )
    return chooser + source


def pybind11_include() -> str:
    if importlib.util.find_spec("pybind11"):
        import pybind11

        return pybind11.get_include()
    return str(Path(torch.__file__).parent / "include")  # torch brings a copy


def build(folder: Path) -> Path:
    source, library = folder / "page_table.cpp", folder / "_C.so"
    source.write_text(mutated_source())
    flags = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden"]
    flags += ['-DWIM_VERSION="mutant"', '-DWIM_SOURCE_DIGEST="mutant"']
    flags += [f"-I{d}" for d in (CSRC, sysconfig.get_paths()["include"], pybind11_include())]
    compiler = os.environ.get("CXX", "c++")
    files = [str(source), str(CSRC / "bindings.cpp")]
    subprocess.run([compiler, *flags, "-shared", *files, "-o", str(library)], check=True)
    return library


def load(library: Path, fault: int) -> None:
    """Puts the faulty table in the place of the real one."""
    os.environ["PLANTED_FAULT"] = str(fault)
    # Another package: pybind11 hands out the loaded module again for a name that it knows.
    spec = importlib.util.spec_from_file_location("planted._C", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.version == "mutant"
    _native.PageTable = module.PageTable


def walk_with(library: Path, fault: int) -> None:
    load(library, fault)
    for seed in range(NUM_WALKS):
        rng = random.Random(seed)
        walk = CacheWalk(rng.choice((4, 8, 16, 32)), rng.choice((3, 4, 8)))
        for _ in range(150):
            random_step(walk, rng)
            walk.check()
        walk.finish()


def keep_books_with(library: Path, fault: int) -> None:
    """Ends well if the integrity check has the right words for this fault's first trace."""
    load(library, fault)
    table = _native.PageTable(8, 4)
    try:
        trunk = table.create()
        table.apply(table.prepare([(trunk, 6)]))
        branch = table.fork(trunk)
        table.check_integrity()
        table.apply(table.prepare([(trunk, 1), (branch, 1)]))
        table.check_integrity()
        table.release(table.fork(trunk))
        table.check_integrity()
        table.release(branch)
        table.rollback(trunk, 3)
        table.check_integrity()
    except RuntimeError as error:
        found = str(error)
    else:
        found = "nothing"
    wanted = BROKEN_BOOKS[NAMES[fault]]
    if not re.fullmatch(wanted, found):
        raise AssertionError(f"{NAMES[fault]}: the check says {found!r}, not {wanted!r}")


def ends_well(job: Callable[[Path, int], None], library: Path, fault: int) -> bool:
    """Whether a forked child gets through the job."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS_PER_FAULT)
        if job is walk_with:  # its failures are what is wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = 1
        try:
            job(library, fault)
            status = 0
        except AssertionError as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        survivors = [name for i, name in enumerate(NAMES) if ends_well(walk_with, library, i)]
        words = [ends_well(keep_books_with, library, NAMES.index(name)) for name in BROKEN_BOOKS]
    for name in survivors:
        print(f"passes the walk: {name}")
    print(f"{len(NAMES) - 1} faults, {len(survivors) - ('none' in survivors)} not caught")
    print(f"{words.count(False)} of {len(words)} integrity texts wrong")
    return int(survivors != ["none"] or not all(words))


if __name__ == "__main__":
    sys.exit(main())
