"""Compare the numbers of two nights to the last bit: did a change that should change no number change one?

    python -m tests.nets.nightly --only differential --part 0.1 --seed 7 --output before ...   (on the old commit)
    python -m tests.nets.nightly --only differential --part 0.1 --seed 7 --output after ...    (on the new one)
    python -m tests.nets.same_bits before/nets.jsonl after/nets.jsonl

Each record of the net "differential" has a digest of the weights, slots and counters of each rank. The exit status is 1 if a case
has other digests. A case that trains on parameter servers sums in the order of arrival: give the old night twice, then the cases
whose digests differ between these two are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def digests(file: str) -> dict[tuple[str, ...], str]:
    """Return the digests of each case of a file."""
    records = [json.loads(line) for line in Path(file).read_text().splitlines()]
    key = ("mpi", "where", "seed", "number")
    return {tuple(str(record[word]) for word in key): record["bits"] for record in records if record.get("bits")}


def main(files: list[str]) -> int:
    """Compare the first files with the last one; return the exit status."""
    *old, new = map(digests, files)
    common = [case for case in new if all(case in each for each in old)]
    steady = [case for case in common if len({each[case] for each in old}) == 1]
    changed = [case for case in steady if old[0][case] != new[case]]
    for case in changed:
        print(f"other bits: {', '.join(case)}")
    print(f"{len(steady)} cases compared, {len(changed)} with other bits; {len(common) - len(steady)} are not steady")
    return 1 if changed or not steady else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
