"""launch/kubernetes: what is there fits the published schemas and fits together, and a pod's command survives eviction.

No cluster is needed, and none is used: pods are processes here, in network namespaces.
"""

import copy
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.support.hosts import Hosts, namespaces_are_allowed

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "kubernetes"
KUBERNETES = "1.37"
ADDRESSES = {"0": "10.79.0.1", "1": "10.79.0.2"}
STEPS, EVERY = 60, 10
TOLERANCE = 1e-5
DEADLINE_SECONDS = 300.0


def job_set():
    documents = yaml.safe_load_all((FOLDER / "train.yaml").read_text())
    return next(each for each in documents if each["kind"] == "JobSet")


def problems_of(each):
    """What is wrong with a resource by its published schema; None where nothing is."""
    if each["kind"] != "JobSet":
        try:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            return str(error)
        return None
    # Imported here, as it takes a second, which collecting the tests would take in each worker.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    # The model of JobSet's own fields, which ignores those that it does not know; and core's strict schema of a Job.
    try:
        known = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(each)).to_dict()
    except ValueError as error:
        return str(error)
    lost = {"apiVersion", "kind", "metadata", "spec"} ^ each.keys()
    spec = {name: value for name, value in each["spec"].items() if name != "replicatedJobs"}
    lost |= {name for name, value in spec.items() if known["spec"].get(name) != value}
    for replicated in each["spec"]["replicatedJobs"]:
        lost |= replicated.keys() - {"name", "replicas", "template", "dependsOn", "groupName"}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **replicated["template"]}
        problem = problems_of(job)
        if problem is not None:
            return problem
    return f"no fields of a JobSet: {lost}" if lost else None


def pod_of(each):
    return each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def environment_of(pod):
    return {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}


def test_all_fits_its_schemas():
    for each in yaml.safe_load_all((FOLDER / "train.yaml").read_text()):
        assert problems_of(each) is None, each["kind"]


@pytest.mark.parametrize(
    "path, value",
    [
        ("spec.network.enableDnsHostnames", True),
        ("spec.failurePolicy.maxRestarts", "3"),
        ("spec.replicatedJob", []),
        ("spec.replicatedJobs.0.replicas", "one"),
        ("spec.replicatedJobs.0.parallelism", 4),
        ("spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0.action", None),
        ("spec.replicatedJobs.0.template.spec.template.spec.terminationGracePeriod", 30),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers.0.env.0.value", 2),
        ("spec.replicatedJobs.0.template.spec.template.spec.volumes.1.emptyDir.sizeLimits", "1Gi"),
    ],
)
def test_what_does_not_fit_is_found(path, value):
    each = job_set()
    node = each
    *parts, last = path.split(".")
    for part in parts:
        node = node[int(part) if part.isdigit() else part]
    node[last] = value
    assert problems_of(each) is not None


def test_the_parts_fit_together():
    each = job_set()
    name, (replicated,) = each["metadata"]["name"], each["spec"]["replicatedJobs"]
    job, pod, (container,) = replicated["template"]["spec"], pod_of(each), pod_of(each)["containers"]
    environment = environment_of(pod)
    assert environment["RENDEZVOUS"].split(":")[0] == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(environment["RENDEZVOUS"].split(":")[1]) == container["ports"][0]["containerPort"]
    at_least, at_most = map(int, environment["NODES"].split(":"))
    assert at_least <= at_most == job["parallelism"] == job["completions"]
    assert environment["RANKS_PER_NODE"] == container["resources"]["limits"]["nvidia.com/gpu"]
    # Of an eviction. Where a pod joins, torchrun gives 30 seconds whatever is set.
    stop_seconds = int(re.search(r"stop_seconds=(\d+)", " ".join(container["args"]))[1])
    assert stop_seconds < int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]} and "/dev/shm" in mounted.values()
    out = container["args"][container["args"].index("--out") + 1]
    assert out.startswith(mounted["checkpoints"])
    claims = [each for each in yaml.safe_load_all((FOLDER / "train.yaml").read_text()) if each["kind"] != "JobSet"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claims[0]["metadata"]["name"]
    for argument in container["args"][:2]:
        assert (ROOT / argument).exists()
    asked = set(re.findall(r"\$([A-Z_]+)|\(\(([A-Z_]+)", " ".join(container["command"])))
    assert {first or second for first, second in asked} == {*environment, "JOB_COMPLETION_INDEX"} - {
        name for name in environment if name.startswith(("TORCH_", "SHARDOPT_"))
    }
    first, last = map(int, environment["SHARDOPT_NETWORK"].removeprefix(":").split("-"))
    assert last - first >= 2 * int(environment["RANKS_PER_NODE"])  # a port for each rank, and for what tiers serve


def test_pods_fit_the_standard_restricted():
    """Of Pod Security: what a namespace that enforces it asks of a pod and of its containers."""
    pod = pod_of(job_set())
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
        assert not context.get("privileged") and not any("hostPort" in port for port in container["ports"])
    assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "persistentVolumeClaim", "emptyDir"}


def test_the_image_is_made_of_what_there_is():
    lines = (FOLDER / "Containerfile").read_text().splitlines()
    for *sources, _ in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        assert all((ROOT / source).exists() for source in sources), sources
    installs = [line for line in lines if "pip install" in line]
    assert installs and all("--constraint configs/constraints.txt" in line for line in installs)


class Pod:
    """A pod's command, run as it stands in train.yaml, with its environment; all but what a machine with GPUs has."""

    def __init__(self, hosts, index, out, seconds_a_step=0.4, nodes="1:2"):
        pod = pod_of(job_set())
        (container,) = pod["containers"]
        settings = environment_of(pod) | {
            "NODES": nodes,
            "RANKS_PER_NODE": "1",
            "RENDEZVOUS": f"{ADDRESSES['0']}:29400",
            "RENDEZVOUS_SETTINGS": "last_call_timeout=8,read_timeout=20",
            "POD_IP": ADDRESSES[index],
            "JOB_COMPLETION_INDEX": index,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "GLOO_SOCKET_IFNAME": "cable",
            "OMP_NUM_THREADS": "1",
            "SECONDS_A_STEP": str(seconds_a_step),
        }
        arguments = [each.replace("/checkpoints/lm", str(out)) for each in container["args"]]
        assert arguments[0] == "examples/train_lm.py"
        arguments[0] = "tests/launch/slow_lm.py"  # the same program, at a speed at which something can happen to it
        arguments += [f"steps={STEPS}", f"checkpoints.every={EVERY}", "data.batch=12", "data.context=16"]
        arguments += ["model.layers=1", "model.width=32", "model.heads=2", "schedule.warmup_steps=3"]
        command = ["ip", "netns", "exec", hosts.names[index], *container["command"], *arguments]
        self.log = Path(f"{out}-{index}.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=log, stderr=log)


@pytest.fixture
def hosts():
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    with Hosts(ADDRESSES) as made:
        yield made


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_pod_is_evicted_and_replaced(hosts, tmp_path):
    out = tmp_path / "out"

    def entries():
        path = out / "loss.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(is_so, *pods):
        end = time.monotonic() + DEADLINE_SECONDS
        while not any(is_so(entry) for entry in entries()):
            assert time.monotonic() < end and pods[0].process.poll() is None, pods[0].log.read_text()[-3000:]
            time.sleep(0.1)

    first, second = Pod(hosts, "0", out), Pod(hosts, "1", out)
    wait_until(lambda entry: entry["step"] > EVERY + 3 and entry["ranks"] == 2, first)
    second.process.send_signal(signal.SIGTERM)  # as the kubelet does
    second.process.wait(DEADLINE_SECONDS)
    saved = max(entry["step"] for entry in entries())
    assert (out / f"checkpoints/step-{saved:08}/manifest.json").exists()
    wait_until(lambda entry: entry["ranks"] == 1 and entry["step"] > saved + 3, first)
    replacement = Pod(hosts, "1", out)
    assert first.process.wait(DEADLINE_SECONDS) == 0, first.log.read_text()[-3000:]
    assert replacement.process.wait(DEADLINE_SECONDS) == 0, replacement.log.read_text()[-3000:]
    assert [entry["step"] for entry in entries()] == list(range(1, STEPS + 1))  # nothing was lost, or done twice
    assert [ranks for ranks, _ in itertools.groupby(entry["ranks"] for entry in entries())] == [2, 1, 2]
    interrupted = [entry["loss"] for entry in entries()]

    out = tmp_path / "whole"
    pods = [Pod(hosts, index, out, seconds_a_step=0.0, nodes="2") for index in ADDRESSES]
    assert [pod.process.wait(DEADLINE_SECONDS) for pod in pods] == [0, 0], pods[0].log.read_text()[-3000:]
    whole = [entry["loss"] for entry in entries()]
    assert max(abs(a - b) for a, b in zip(interrupted, whole, strict=True)) < TOLERANCE
