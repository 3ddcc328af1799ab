"""Rules about files that nothing else would notice being broken.

Each rule is a function that returns the offences it finds, and is fed one offence here,
so that a rule that finds nothing is known to be able to find something.
"""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files
from pathlib import Path

import pytest
from conftest import top_level_copies
from tables import check_each

import jamp

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = {"jamp": "jamp", **SETUPTOOLS["package-dir"]}
LIBRARY = sorted(
    path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")
)
PYTHON = [*LIBRARY]
for folder in ("tests", "benchmarks", "examples"):
    PYTHON += sorted((ROOT / folder).rglob("*.py"))
LINKS = ["policies", "pallas_kernels"]
COMPAT = ROOT / "jamp" / "_compat.py"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def check_files(check, paths=LIBRARY):
    check_each(paths, check, lambda path: str(path.relative_to(ROOT)))


def packages_on_disk(root):
    """Every folder of the library that holds Python or data, as a package name."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (root / folder).rglob("*"):
            if path.suffix in {".py", ".toml"}:
                parts = path.parent.relative_to(root / folder).parts
                found.add(".".join((package, *parts)))
    return found


def imports_of(package, tree):
    """The statements that import from a package of JAX's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        if any(f"{name}.".startswith(f"{package}.") for name in names):
            yield node


def unexplained_imports(source):
    """Lines of private JAX imports with no comment on them or right above."""
    lines = source.splitlines()
    return [
        node.lineno
        for node in imports_of("jax._src", ast.parse(source))
        if not any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
        and not "".join(lines[: node.lineno - 1][-1:]).lstrip().startswith("#")
    ]


def jax_floor(dependencies):
    """The oldest JAX that the dependencies allow, as a tuple of numbers."""
    (floor,) = (
        found[1] for d in dependencies if (found := re.match(r"jax>=([\d.]+)", d))
    )
    return tuple(map(int, floor.split(".")))


def dead_version_guards(source, floor):
    """Lines that compare with a version that no supported JAX is older than."""
    dead = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                if isinstance(side, ast.Tuple) and ast.literal_eval(side) <= floor:
                    dead.append(node.lineno)
    return dead


def long_functions(source):
    return [
        f"{node.name}: {length} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def relative_imports(source):
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def module_sources(root):
    """The source of every module of the library, by the module's name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path.read_text()
    return found


def imported_modules(sources):
    """For each module those it imports: anywhere in it, and for its types too."""
    found = {}
    for module, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names.update(n if n in sources else node.module for n in inner)
        found[module] = names & sources.keys() - {module}
    return found


def circle(graph):
    """Names that lead to each other in a circle, if any do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def import_circle(sources):
    """Modules that import each other in a circle, if any."""
    return circle(imported_modules(sources))


def room_circle(sources):
    """Folders, and modules outside of them, that import each other in a circle."""
    rooms = {name: ".".join(name.split(".")[:2]) for name in sources}
    graph = {}
    for module, imports in imported_modules(sources).items():
        others = {rooms[other] for other in imports} - {rooms[module]}
        graph.setdefault(rooms[module], set()).update(others)
    return circle(graph)


def rooms_on_disk():
    """Folders of jamp/ and modules beside them, links and the package itself aside."""
    for path in sorted((ROOT / "jamp").iterdir()):
        if path.suffix == ".py" and path.stem != "__init__":
            yield path.name
        elif path.is_dir() and path.name not in LINKS and any(path.glob("*.py")):
            yield f"{path.name}/"


def rooms_described(text):
    """What the table of CONTRIBUTING.md names: rooms, and files by their paths."""
    _, table = text.split("The rooms of `jamp/`", 1)
    table, _ = table.split("\n\n", 2)[1:]
    for row in table.splitlines()[2:]:
        _, first, text, _ = row.split("|")
        rooms = re.findall("`(.*?)`", first)
        yield from rooms
        # A room may name its files where it says what it holds.
        folder = rooms[0] if rooms[0].endswith("/") else f"{Path(rooms[0]).parent}/"
        yield from (f"{folder}{name}" for name in re.findall(r"`(\w+\.py)`", text))


def test_every_room_is_described_and_every_described_one_is_there():
    described = [*rooms_described((ROOT / "CONTRIBUTING.md").read_text("utf-8"))]
    assert not {*rooms_on_disk()} - {*described}
    for name in described:
        assert (ROOT / "jamp" / name).exists(), name


def test_every_file_of_a_room_is_described():
    described = {*rooms_described((ROOT / "CONTRIBUTING.md").read_text("utf-8"))}
    library = ROOT / "jamp"
    files = {str(path.relative_to(library)) for path in library.glob("_*/**/*.py")}
    assert not {f for f in files - described if not f.endswith("__init__.py")}


def test_every_package_on_disk_is_installed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk(ROOT))


def test_an_unlisted_package_is_noticed(tmp_path):
    kernel = tmp_path / "pallas_kernels" / "unscale" / "__init__.py"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert packages_on_disk(tmp_path) == {"jamp.pallas_kernels.unscale"}


@pytest.mark.parametrize("name", LINKS)
def test_link_points_to_the_folder_beside_jamp(name):
    link = ROOT / "jamp" / name
    # Git writes the target as text where links are not supported.
    target = str(link.readlink()) if link.is_symlink() else link.read_text()
    assert (link.parent / target).resolve() == ROOT / name
    assert (ROOT / name / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["gpu", "cpu", "tpu"])
def test_policy_tables_are_found_where_they_are_installed(name):
    assert files("jamp.policies").joinpath(f"{name}.toml").is_file()


def test_top_level_copy_is_noticed():
    assert top_level_copies({"jamp": ..., "jamp.policies": ...}) == []
    assert top_level_copies({"policies": ...}) == ["policies"]


@pytest.mark.parametrize("find", [import_circle, room_circle])
def test_modules_and_folders_import_each_other_in_no_circle(find):
    found = find(module_sources(ROOT))
    assert not found, " <- ".join(found)


def test_a_circle_of_folders_is_noticed():
    modules = {"p": "", "p.a.x": "import p.b.y", "p.a.z": "", "p.b.y": "import p.a.z"}
    assert not import_circle(modules)
    assert {*room_circle(modules)} == {"p.a", "p.b"}


@pytest.mark.parametrize(
    "source",
    [
        "from p import b",
        "from p.b import x",
        "import p.b",
        "def f():\n    from p import b",
        "if TYPE_CHECKING:\n    from p.b import B",
    ],
)
def test_import_circle_is_noticed(source):
    modules = {"p": "", "p.a": source, "p.b": "import p.c", "p.c": "from p import a"}
    assert {*import_circle(modules)} == {"p.a", "p.b", "p.c"}
    assert import_circle({**modules, "p.c": "from p import d"}) == []


def test_private_jax_is_imported_in_one_file():
    def check(path):
        found = list(imports_of("jax._src", ast.parse(path.read_text())))
        assert not found or path == COMPAT

    check_files(check)


def test_jax_interpreters_are_imported_where_primitives_are_defined():
    """They are public, and change the most of what is."""

    def check(path):
        found = list(imports_of("jax.interpreters", ast.parse(path.read_text())))
        assert not found or path == COMPAT or path.parent.name == "_lowerings"

    check_files(check)


@pytest.mark.parametrize(
    "source", ["import jax._src.core", "from jax import _src", "from jax._src import x"]
)
def test_private_jax_import_is_noticed(source):
    assert list(imports_of("jax._src", ast.parse(source)))
    assert not list(imports_of("jax.s", ast.parse(source)))


def test_private_jax_imports_are_explained():
    assert unexplained_imports(COMPAT.read_text()) == []


def test_unexplained_private_jax_import_is_noticed():
    explained = "# No public name for x.\nfrom jax._src import x\n"
    assert unexplained_imports(explained + "from jax._src import y\n") == [3]


def test_version_guards_can_fail():
    floor = jax_floor(PYPROJECT["project"]["dependencies"])
    assert dead_version_guards(COMPAT.read_text(), floor) == []


def test_dead_version_guard_is_noticed():
    guards = "if version >= (0, 12): x\nif version < (0, 10): y"
    assert dead_version_guards(guards, jax_floor(["optax", "jax>=0.10"])) == [2]


def test_files_and_functions_are_short():
    def check(path):
        source = path.read_text()
        assert len(source.splitlines()) <= MAX_FILE_LINES
        assert long_functions(source) == []

    check_files(check, PYTHON)


def test_long_function_is_noticed():
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(f"def f():\n{body}") == ["f: 61 lines"]


def test_kernels_import_jamp_by_its_full_name():
    """A relative import would mean something else from the folder's real place."""
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        assert relative_imports(path.read_text()) == [], path


def test_relative_import_is_noticed():
    assert relative_imports("from jamp import x\nfrom . import y") == [2]


def test_importing_jamp_does_not_import_flax():
    check = "import sys, jamp; raise SystemExit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_workflow_runs_on_each_python_that_is_supported():
    workflow = (ROOT / ".github/workflows/checks.yml").read_text("utf-8")
    classifiers = " ".join(PYPROJECT["project"]["classifiers"])
    supported = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert sorted(set(re.findall(r"\b3\.\d+\b", workflow))) == supported


def test_the_version_stands_in_one_place_and_is_cited():
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    cited = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {jamp.__version__}\n" in cited
    assert f"## [{jamp.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
