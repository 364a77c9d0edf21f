"""What Ray listens on: of a run with a machine to itself the loopback only; a cluster with tokens refuses others."""

import ipaddress
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LISTENERS = """
import json, logging, psutil, ray
from lmm_r1.cluster import nodes
nodes.connect(num_cpus=1, include_dashboard=False, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
me = psutil.Process()
found = [link.laddr.ip for one in [me, *me.children(recursive=True)] for link in one.net_connections("inet")
         if link.status == "LISTEN"]
print(json.dumps([found, ray.nodes()[0]["NodeManagerAddress"]]))
"""
# A cluster of this process, then a process that joins it with another token, and one with the same.
CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    for token in ("b" * 64, os.environ["RAY_AUTH_TOKEN"]):
        environment = {**os.environ, "RAY_AUTH_TOKEN": token, "RAY_ADDRESS": cluster.address}
        done = subprocess.run([sys.executable, "-c", sys.argv[1]], env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr, sep="")
finally:
    cluster.shutdown()
"""
JOIN = """
import ray
from lmm_r1.cluster import nodes
from lmm_r1.errors import UserError
try:
    nodes.connect(log_to_driver=False)
    print("joined", ray.get(ray.remote(lambda: 1).remote()))
except UserError as error:
    print("refused", error)
"""


def output(*command: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", *command], env=environment | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.parametrize("auth", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}])
def test_a_run_on_one_machine_listens_on_the_loopback_only(auth):
    found, node = json.loads(output(LISTENERS, **auth).splitlines()[-1])
    assert node == "127.0.0.1"
    assert len(found) > 5, "Ray's processes were found"
    assert [address for address in found if not is_loopback(address)] == []


def test_a_cluster_with_tokens_refuses_a_process_with_another_one():
    told = output(CLUSTER, JOIN, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64)
    assert "refused RAY_ADDRESS=" in told, told
    assert "if it has tokens" in told, told
    assert "joined 1" in told, told
