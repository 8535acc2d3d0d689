"""Load data sets: files in, tensors out."""

from egru.data.augment import augment, warp
from egru.data.batches import Batches, fits_on_device
from egru.data.datasets import Classification, Split, Text
from egru.data.digits import digits
from egru.data.dvs_clips import dvs_clips
from egru.data.event_camera import Events, denoise, event_frames, gesture_frames, read_events, time_slices
from egru.data.event_tasks import EventSamples, event_order, interval_comparison, interval_match, yin_yang
from egru.data.files import DataCorrupt, DataMissing, data_root
from egru.data.gestures import dvs_gesture, dvs_gesture_raw, pack_gestures, unpack_frames
from egru.data.mnist import sequential_mnist
from egru.data.pokerdvs import Recording, Recordings, pokerdvs
from egru.data.text import batchify, penn_treebank, wikitext2

__all__ = [
    "Batches",
    "Classification",
    "DataCorrupt",
    "DataMissing",
    "EventSamples",
    "Events",
    "Recording",
    "Recordings",
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
    "event_order",
    "fits_on_device",
    "gesture_frames",
    "interval_comparison",
    "interval_match",
    "pack_gestures",
    "penn_treebank",
    "pokerdvs",
    "read_events",
    "sequential_mnist",
    "time_slices",
    "unpack_frames",
    "warp",
    "wikitext2",
    "yin_yang",
]
