"""Data sets: files in, tensors out."""

from egru.data.augment import augment, warp
from egru.data.batches import Batches, fits
from egru.data.digits import digits
from egru.data.events import Events, denoise, dvs_clips, event_frames, gesture_frames, read_events, time_slices
from egru.data.gestures import dvs_gesture, dvs_gesture_raw, pack_gestures, unpack_frames
from egru.data.mnist import sequential_mnist
from egru.data.root import DataCorrupt, DataMissing, data_root
from egru.data.sets import Classification, Split, Text, batchify
from egru.data.text import penn_treebank, wikitext2

__all__ = [
    "Batches",
    "Classification",
    "DataCorrupt",
    "DataMissing",
    "Events",
    "Split",
    "Text",
    "augment",
    "batchify",
    "data_root",
    "denoise",
    "digits",
    "dvs_clips",
    "dvs_gesture",
    "dvs_gesture_raw",
    "event_frames",
    "fits",
    "gesture_frames",
    "pack_gestures",
    "penn_treebank",
    "read_events",
    "sequential_mnist",
    "time_slices",
    "unpack_frames",
    "warp",
    "wikitext2",
]
