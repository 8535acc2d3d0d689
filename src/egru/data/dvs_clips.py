"""Four short raw recordings of an event camera, for tests of the preprocessing on real events."""

import os

from egru.data.event_camera import Events, parse_events
from egru.data.files import DataFile, find_file, verify_content

FOLDER = "dvs-raw"
GESTURES = {"1": "hand clap", "2": "right hand wave", "8": "arm roll", "10": "air guitar"}
_ORIGIN = (
    "a copy of this project's test data: these recordings have no public address (egru.data.read_events reads others)"
)
FILES = {
    name: DataFile(f"{name}.bs2", sha256, _ORIGIN)
    for name, sha256 in {
        "1": "adb41d4a19c2f0815b67fc80ef72d0b58ff9d86a558f905730eb0c2639766214",
        "2": "c96b1793ccccc3e737406a1a3a3b37cb917361038306a55e87577770c2405c3e",
        "8": "6148ca549a7be5b1e91234fd3040849d117a225dd3f69b5e180e467dff7f3951",
        "10": "1d4050500bf39882d7b9b2174cc1810baaff6afb411e83284dc9613b296bcbcf",
    }.items()
}


def dvs_clips(root: str | os.PathLike[str] | None = None) -> dict[str, Events]:
    """Load four recordings of 1.45 s each.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. The files ``1.bs2``, ``2.bs2``, ``8.bs2`` and
            ``10.bs2`` are read from its folder ``dvs-raw``.

    Returns:
        The recordings by gesture: "hand clap", "right hand wave", "arm roll", "air guitar".

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a file is damaged.

    Example:
        >>> events = egru.data.dvs_clips()["hand clap"]  # doctest: +SKIP
        >>> len(egru.data.denoise(events).t) < len(events.t)  # doctest: +SKIP
        True
    """
    clips: dict[str, Events] = {}
    for name, file in FILES.items():
        path = find_file(file, FOLDER, root)
        content = path.read_bytes()
        verify_content(content, file, path)
        clips[GESTURES[name]] = parse_events(content, path)
    return clips
