"""The scripts examples/convert.py and examples/convert_lightning.py."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--hidden", "6", "--epochs", "2", "--activity", "0.4"]

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.mark.parametrize("name", ["convert", "convert_lightning"])
@pytest.mark.filterwarnings("ignore")  # Lightning warns of its own deprecated calls
def test_fine_tuning_in_a_loop_reaches_the_activity(name, capsys):
    if name == "convert_lightning":
        pytest.importorskip("lightning", reason="the example requires lightning: pip install lightning")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](SMALL)
    found = re.search(r"activity sparsity:? ([\d.]+)%", capsys.readouterr().out)
    assert found is not None
    assert 50 < float(found[1]) < 75
