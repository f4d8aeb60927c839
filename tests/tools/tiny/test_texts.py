import pytest

from tests import ROOT
from tools.tiny.texts import files


@pytest.mark.parametrize(("name", "text"), files().items())
def test_the_scripts_write_the_committed_data_sets(name: str, text: str) -> None:
    assert (ROOT / "data/tiny" / name).read_text(encoding="utf-8") == text
