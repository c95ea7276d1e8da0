"""The page of a report in a real browser: no errors, names for screen readers, keys, a phone, numbers of `--json`."""

import json
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from tests.support.browser import browser, complaints, lacking, look

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("selenium", reason="selenium is not installed")
if lacking():
    pytest.skip(lacking(), allow_module_level=True)

HOSTILE = "layers.0.<img src=x onerror='document.title=1'></script>"


def halves(key, stored):
    if len(stored.shape) < 2:
        return Layout.replicated(stored.shape)
    return mesh_layout(stored.shape, Mesh((2, 2), (0, 1, 2, 3)), (Split(0, 0), Split(1, 1)))


@pytest.fixture(scope="module")
def driver():
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run of 60 steps, its newest compared with its first; a checkpoint of 3,000 tensors; a run with a mirror."""
    root = tmp_path_factory.mktemp("reports")
    with checkpoint.Manager(root / "run") as manager:
        for step in range(1, 61):
            app = {f"layers.{i}.w": torch.full((8, 4), 1.0 + step / 100) for i in range(5)}
            if step == 60:
                app["layers.3.w"] *= 100
            app |= {f"state.layers.{i}.m": torch.full((2,), float(step)) for i in range(5)}
            app[HOSTILE] = torch.tensor([step, float("nan")])
            manager.save(step, app, metrics={"loss": 1 / step, "<b>": 2.0})
    checkpoint.reshard(root / "run" / "step-00000060", root / "last", layout=halves)
    checkpoint.save(root / "large", {f"m.layers.{i}.w{j}": torch.ones(j + 1) for i in range(300) for j in range(10)})
    with checkpoint.Manager(root / "copied") as manager:
        for step in range(1, 41):
            manager.save(step, {"w": torch.ones(2)})
    shutil.copytree(root / "copied", root / "mirror")
    for gone in ("copied/step-00000007", "copied/step-00000009", "mirror/step-00000009"):
        next((root / gone).glob("*.safetensors")).unlink()
    made = {}
    calls = {
        "run": [root / "run", "--values", "--against", root / "run" / "step-00000001"],
        "last": [root / "last"],
        "large": [root / "large"],
        "copied": [root / "copied", root / "mirror", "--values"],
    }
    for name, arguments in calls.items():
        page = root / f"{name}.html"
        assert main(["report", *map(str, arguments), "-o", str(page)]) == 0
        made[name] = page
    return made


@pytest.fixture
def shown(driver, pages):
    """Opens a page; the console must have nothing to say, before the test and after it."""

    def show(name, **options):
        look(driver, pages[name], **options)
        return driver, json.loads(driver.execute_script("return document.getElementById('document').textContent"))

    yield show
    assert complaints(driver) == []


def texts(driver, label):
    """Returns the cells of all rows in view of the grid with this label."""
    return driver.execute_script(
        """const grid = document.querySelector(`[aria-label^="${arguments[0]}"]`);
        return [...grid.querySelectorAll(".body [role=row]")].filter((row) => row.style.display !== "none")
          .sort((a, b) => a.getAttribute("aria-rowindex") - b.getAttribute("aria-rowindex"))
          .map((row) => [...row.children].map((cell) => cell.textContent));""",
        label,
    )


def press(driver, label, key, times=1):
    driver.execute_script(
        """const grid = document.querySelector(`[aria-label^="${arguments[0]}"]`); grid.focus();
        for (let i = 0; i < arguments[2]; i += 1)
          grid.dispatchEvent(new KeyboardEvent("keydown", { key: arguments[1], bubbles: true }));""",
        label,
        key,
        times,
    )


def facts(driver, inside):
    """Returns terms and their values below the first element of a selector."""
    return driver.execute_script(
        """const host = document.querySelector(arguments[0]);
        const terms = [...host.querySelectorAll("dt")];
        return Object.fromEntries(terms.map((term) => [term.textContent, term.nextSibling.textContent]));""",
        inside,
    )


def test_a_hostile_key_is_shown_as_text_and_runs_nothing(shown):
    driver, document = shown("run")
    assert driver.title == f"{document['url']} · shardopt report"
    assert not driver.find_elements("css selector", "img, b")
    assert [row[0] for row in texts(driver, "Tensors")].count(HOSTILE) == 1


def test_a_script_that_comes_into_the_page_does_not_run(driver, pages):
    look(driver, pages["run"])
    driver.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    assert driver.execute_async_script("setTimeout(() => arguments[0](window.ran ?? 'no'), 100)") == "no"
    assert any("Content Security Policy" in each for each in complaints(driver))


def test_the_numbers_of_steps_are_those_of_the_document(shown):
    driver, document = shown("run")
    (run,) = document["runs"]
    press(driver, "Steps of", "End")
    rows = texts(driver, "Steps of")
    last = run["steps"][-1]
    assert rows[-1][0] == "60" and rows[-1][1] == "complete" and rows[-1][-1] == "newest"
    assert [float(row[5]) for row in rows] == pytest.approx(
        [step["metrics"]["loss"] for step in run["steps"][-len(rows) :]], rel=1e-5
    )
    press(driver, "Steps of", "Enter")
    assert facts(driver, "#run-0 .details")["loss"] == f"{last['metrics']['loss']:.6g}"


def test_the_numbers_of_a_tensor_are_those_of_the_document(shown):
    driver, document = shown("run")
    tensor = next(each for each in document["checkpoint"]["tensors"] if each["key"] == "layers.3.w")
    change = next(each for each in document["against"]["tensors"] if each["key"] == "layers.3.w")
    next(
        each for each in driver.find_elements("css selector", "[data-finding] button") if "layers.3.w" in each.text
    ).click()
    found = facts(driver, "#checkpoint .grid[aria-label=Tensors] + .details")
    statistics = tensor["statistics"]
    assert (found["elements"], found["bytes"]) == ("32", "128 (128 B)")
    names = {"norm": "norm", "root mean square": "rms", "mean": "mean", "std": "std", "max": "maximum"}
    for term, name in names.items():
        assert float(found[term]) == pytest.approx(statistics[name], rel=1e-5, abs=1e-12)
    assert float(found["changed"].split()[1]) == pytest.approx(change["relative"], rel=1e-5)
    (row,) = [row for row in texts(driver, "Tensors") if row[0] == "layers.3.w"]
    assert float(row[-2]) == pytest.approx(change["relative"], rel=1e-5)


def test_sums_of_modules_and_of_the_checkpoint_are_those_of_the_document(shown):
    driver, document = shown("large")
    found, (modules,) = document["checkpoint"], texts(driver, "Tree")
    assert modules[1:3] == [f"{found['tensor_count']:,}", f"{found['elements']:,}"]
    assert facts(driver, "#checkpoint")["tensors"].startswith(f"{found['tensor_count']:,}, {found['elements']:,} ")


def test_only_rows_in_view_are_elements(shown):
    driver, _ = shown("large")
    grid = driver.find_element("css selector", "[aria-label=Tensors]")
    assert grid.get_attribute("aria-rowcount") == "3001"
    assert len(grid.find_elements("css selector", ".body [role=row]")) < 60
    press(driver, "Tensors", "End")
    assert texts(driver, "Tensors")[-1][0] == "m.layers.299.w9"


def test_a_column_sorts_both_ways(shown):
    driver, _ = shown("run")
    (button,) = [each for each in driver.find_elements("css selector", "#checkpoint button") if each.text == "rms"]
    header = button.find_element("xpath", "..")
    driver.execute_script("arguments[0].click()", button)
    falling = [float(row[4]) for row in texts(driver, "Tensors")]
    assert header.get_attribute("aria-sort") == "descending" and falling == sorted(falling, reverse=True)
    driver.execute_script("arguments[0].click()", button)
    rising = [float(row[4]) for row in texts(driver, "Tensors")]
    assert header.get_attribute("aria-sort") == "ascending" and rising == falling[::-1] and len({*rising}) > 2


def test_keys_open_and_close_the_tree(shown):
    driver, _ = shown("large")
    press(driver, "Tree", "ArrowDown")
    press(driver, "Tree", "ArrowRight")
    assert [row[0] for row in texts(driver, "Tree")[:3]] == ["▾ m.layers", "▸ 0", "▸ 1"]
    tree = driver.find_element("css selector", "[aria-label='Tree of keys']")
    active = driver.find_element("id", tree.get_attribute("aria-activedescendant"))
    assert (active.get_attribute("aria-level"), active.get_attribute("aria-expanded")) == ("1", "true")
    press(driver, "Tree", "ArrowLeft")
    assert len(texts(driver, "Tree")) == 1


def test_a_filter_says_how_many_tensors_are_left(shown):
    driver, _ = shown("large")
    driver.find_element("css selector", "input[type=search]").send_keys("layers.7.")
    assert driver.find_element("css selector", "#checkpoint .tools [role=status]").text == "10 of 3,000 tensors"


def test_a_layout_is_drawn_with_a_box_for_each_rank(shown):
    driver, _ = shown("last")
    press(driver, "Tensors", "ArrowDown", times=2)
    press(driver, "Tensors", "Enter")
    picture = driver.find_element("css selector", "#checkpoint [aria-label=Tensors] + .details svg")
    assert [each.text for each in picture.find_elements("css selector", "text")] == ["0", "1", "2", "3"]
    titles = [each.get_attribute("textContent") for each in picture.find_elements("css selector", "title")]
    assert titles[0] == "rank 0: [0:4, 0:2]" and titles[3] == "rank 3: [4:8, 2:4]"
    assert len({each.get_attribute("fill") for each in picture.find_elements("css selector", "rect")}) == 4


def test_keys_move_over_the_heat_map_and_say_each_change(shown):
    driver, document = shown("run")
    press(driver, "Heat map", "ArrowDown", times=3)
    press(driver, "Heat map", "ArrowRight")
    said = driver.find_element("css selector", "#changes > [role=status]").text
    (change,) = [each for each in document["against"]["tensors"] if each["key"] == "layers.3.w"]
    share, most = (f"{change[name]:.6g}" for name in ("relative", "maximum"))
    assert said.startswith(
        f"layers.3 · w: by {share} × its old norm, an element by at most {most}, 32 of 32 elements, "
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_is_as_wide_as_the_screen_and_follows_its_scheme(shown, width, dark):
    driver, _ = shown("run", width=width, dark=dark)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    red, green, blue = driver.execute_script(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (red + green + blue < 150) == dark


def test_what_can_be_focused_has_a_name(shown):
    driver, _ = shown("run")
    targets = driver.find_elements("css selector", "a, button, input, [tabindex]")
    assert len(targets) > 20 and all(each.accessible_name for each in targets if each.is_displayed())
    names = {each.aria_role: each.accessible_name for each in driver.find_elements("css selector", "section")}
    assert names.keys() == {"region"}


def test_each_place_has_a_column_that_is_coloured_where_a_step_is_not_complete(shown):
    driver, _ = shown("copied")
    rows = {row[0]: row[1:3] for row in texts(driver, "Steps of")}
    assert rows["7"] == ["files missing", "complete"] and rows["9"] == ["files missing"] * 2
    tones = driver.execute_script(
        """return [...document.querySelectorAll("#run-0 .grid .body [role=row]")]
          .filter((row) => ["7", "8", "9"].includes(row.firstChild.textContent))
          .map((row) => [...row.children].slice(0, 3).map((cell) => cell.className.replace("number ", "")));"""
    )
    assert sorted(tones) == [["bad", "bad", "bad"], ["good", "good", "good"], ["warn", "bad", "good"]]


def test_facts_and_the_timeline_count_what_each_place_has(shown):
    driver, document = shown("copied")
    found = facts(driver, "#run-0")
    assert found["steps"] == "39 of 40 can be restored; 1 from one place only"
    urls = [each["url"] for each in document["runs"][0]["places"]]
    assert found["places"] == f"root {urls[0]}: 38 of 40 steps completemirror {urls[1]}: 39 of 40 steps complete"
    marks = driver.find_elements("css selector", "svg .incomplete title, svg .alone title")
    assert [each.get_attribute("textContent") for each in marks] == [
        "step 7: complete only in mirror",
        "step 9: cannot be restored from anywhere",
    ]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("name", "label"), [("copied", "Steps of"), ("run", "Tensors")])
def test_a_click_on_a_row_leaves_it_in_view_with_what_it_shows(shown, name, label, width):
    driver, _ = shown(name, width=width)
    driver.execute_script(
        """const grid = document.querySelector(`[aria-label^="${arguments[0]}"]`);
        grid.scrollIntoView();
        const lowest = Math.min(grid.getBoundingClientRect().bottom, innerHeight);
        [...grid.querySelectorAll(".body [role=row]")].filter((row) => row.style.display !== "none")
          .findLast((row) => row.getBoundingClientRect().bottom <= lowest).click();""",
        label,
    )
    seen = driver.execute_script(
        """const grid = document.querySelector(`[aria-label^="${arguments[0]}"]`);
        const panel = arguments[0] === "Tensors" ? grid.nextSibling : grid.previousSibling;
        return [grid.querySelector("[aria-selected=true]"), panel].map((each) => each.getBoundingClientRect())
          .map(({ top, bottom }) => top >= -1 && bottom <= innerHeight + 1);""",
        label,
    )
    assert seen == [True, True]


def test_a_header_says_by_which_column_rows_are_sorted(shown):
    driver, _ = shown("copied")
    signs = driver.execute_script(
        """return [...document.querySelectorAll("#run-0 [aria-sort] button")].slice(0, 3).map((button) =>
          [button.parentElement.getAttribute("aria-sort"), getComputedStyle(button, "::after").content]);"""
    )
    assert signs == [["ascending", '" ▲"'], ["none", '" ↕"'], ["none", '" ↕"']]


def test_a_finding_leads_to_its_step_and_takes_the_focus_along(shown):
    driver, document = shown("copied")
    found = next(each for each in document["findings"] if each["kind"] == "one place")
    button = next(
        each for each in driver.find_elements("css selector", "[data-finding] button") if "step 7 " in each.text
    )
    assert button.text == found["text"]
    button.send_keys("\ue007")
    focused = driver.switch_to.active_element
    assert focused.find_element("css selector", "h3").text == "step 7: complete only in mirror"


def test_the_slider_brings_the_row_of_a_step_into_the_middle_of_the_table(shown):
    driver, _ = shown("copied")
    slider = driver.find_element("css selector", "#run-0 input[type=range]")
    driver.execute_script("arguments[0].value = 24; arguments[0].dispatchEvent(new Event('input'))", slider)
    selected = driver.find_element("css selector", "#run-0 [aria-selected=true]")
    assert selected.text.split()[0] == "25"
    row, table = (each.rect for each in (selected, driver.find_element("css selector", "#run-0 .grid")))
    assert 0.3 < (row["y"] - table["y"]) / table["height"] < 0.7


def test_the_section_of_a_checkpoint_names_its_step_whichever_is_chosen(shown):
    driver, _ = shown("copied")
    press(driver, "Steps of", "Home")
    press(driver, "Steps of", "Enter")
    assert driver.find_element("css selector", "#run-0 .details h3").text == "step 1: complete"
    assert driver.find_element("id", "checkpoint-title").text == "Checkpoint: step 40"


def test_a_page_says_how_many_elements_are_not_finite(shown):
    driver, document = shown("run")
    assert facts(driver, "#checkpoint")["not finite"] == "1 NaN, 0 inf, 0 -inf in 1 tensor: all elements were read"
    assert document["checkpoint"]["not_finite"]["nan"] == 1
    assert "No NaN" not in driver.find_element("id", "findings").text
    driver, _ = shown("copied")
    assert "No NaN and no inf" in driver.find_element("id", "findings").text


def test_the_first_column_stays_in_view_on_a_phone(shown):
    driver, _ = shown("copied", width=390)
    left = driver.execute_script(
        """const grid = document.querySelector("#run-0 .grid");
        grid.scrollLeft = 200;
        const left = (node) => node.getBoundingClientRect().left;
        return left(grid.querySelector(".body [role=row] > :first-child")) - left(grid);"""
    )
    assert 0 <= left < 3


def test_a_key_that_is_cut_keeps_the_number_of_its_layer(shown):
    driver, _ = shown("large", width=390)
    parts = driver.execute_script(
        "return [...document.querySelector('[aria-label=Tensors] .body .key').children].map((each) => each.textContent)"
    )
    assert parts == ["m.layers", ".0.w0"]


def test_tensors_that_changed_like_those_of_other_layers_are_equally_faint(shown):
    """State that changes a hundred times as much as weights is as faint as they are: columns have their own scale."""
    driver, _ = shown("run")
    pixels = driver.execute_async_script(
        """const done = arguments[0], heat = document.querySelector(".heat");
        heat.scrollIntoView();
        requestAnimationFrame(() => requestAnimationFrame(() => {
          const image = heat.querySelector("canvas").getContext("2d").getImageData(0, 0, 300, 400);
          const first = (row, column) => 4 * ((154 + 18 * row) * image.width + 184 + 18 * column);
          const at = (...place) => image.data.slice(first(...place), first(...place) + 3).join();
          done([at(1, 1), at(2, 1), at(6, 2), at(3, 1)]);
        }));"""
    )
    assert pixels[0] == pixels[1] == pixels[2] != pixels[3]
