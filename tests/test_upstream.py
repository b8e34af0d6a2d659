"""The scripts of `docs/upstream.md` still print what the page says: when one does not, a workaround can go."""

import re
from pathlib import Path

import jax
import numpyro
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "upstream.md").read_text()
CODE = r"((?:(?!```).)*)```"
SCRIPTS = re.findall(
    rf"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n{CODE}\n\n```text\n{CODE}", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.mark.slow
@pytest.mark.skipif(f"NumPyro {numpyro.__version__} " not in PAGE, reason="the page is of another version")
@pytest.mark.parametrize(("title", "script", "output"), SCRIPTS, ids=[title for title, _, _ in SCRIPTS])
def test_numpyro_still_does_what_we_report(
    title: str, script: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with jax.numpy_rank_promotion("allow"):
        exec(compile(script, title, "exec"), {"__name__": title})
    assert capsys.readouterr().out == output


@pytest.mark.slow
def test_the_script_for_several_processes_prints_one_of_their_lines_but_for_the_last_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ((script, line),) = re.findall(rf"```python\n{CODE}\n\n```console\n[^\n]*\n([^\n]*)", PAGE, re.DOTALL)
    exec(script, {})
    assert float(capsys.readouterr().out) == pytest.approx(float(line), rel=1e-6)


def test_all_reports_have_a_script() -> None:
    assert len(SCRIPTS) == PAGE.count("\n## ") - 1 == PAGE.count("```python") - 1
