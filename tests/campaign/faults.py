"""Mistakes that are put into the package: the campaign of kills must find each, or it proves nothing."""

from __future__ import annotations

__all__ = ["FAULTS", "IN_PLACE"]

FAULTS = {  # code that victim.py runs
    "words before the copy": """
end = SnapshotFile.end
SnapshotFile.begin = lambda self, buffer, rank: end(self, buffer, rank, latest[0])
""",
    "one buffer": """
for name in ("begin", "write", "write_notes", "end"):
    def method(self, buffer, *args, plain=getattr(SnapshotFile, name)):
        plain(self, 0, *args)
    setattr(SnapshotFile, name, method)
""",
    "old files removed early": """
make = Snapshots._make
def early(self, run, kept, forms, notes_bytes):
    file = make(self, run, kept, forms, notes_bytes)
    job_files.remove_older(self._job, file.path)
    return file
Snapshots._make = early
""",
    "position of another snapshot": """
write_notes = SnapshotFile.write_notes
kept = []
def late(self, buffer, data):
    kept.append(data)
    write_notes(self, buffer, kept[-2] if len(kept) > 1 else data)
SnapshotFile.write_notes = late
""",
    "generation not grown": """
os.environ["MPISTRAT_GENERATION"] = "0"
world.highest = lambda value: 0
""",
    "no revoke": """
world.revoke = lambda: None
""",
    "han on": """
os.environ["OMPI_MCA_coll"] = "^hcoll,portals4"
""",
}
IN_PLACE = ("no revoke", "han on")  # those that are none where ranks are started again
