"""A process of an asynchronous run without TensorFlow: the chief obeys commands on stdin."""

import socket
import sys
import threading
import time

from tfpara import StartupError
from tfpara.cluster import asynchronous as cluster
from tfpara.parameter_server.control import member
from tfpara.parameter_server.control.lobby import Lobby, ParameterServerError

STARTUP_SECONDS, TIMEOUT_SECONDS = map(float, sys.argv[1:3])
found = cluster.read()
listeners = []


def start_server(spec):
    """Starts a stand-in for TensorFlow's server that looks the same to others."""
    port = int(found.address.rpartition(":")[2])
    listeners.append(socket.create_server(("", port)))
    print("serving", spec["chief"][0], flush=True)


def say(*words):
    print(*words, flush=True)


if not found.is_chief:
    member.serve(found, start_server, STARTUP_SECONDS)

try:
    lobby = Lobby(found, STARTUP_SECONDS, TIMEOUT_SECONDS)
    lobby.gather()
except StartupError as error:
    sys.exit(f"StartupError: {error}")
say("gathered", lobby.tensorflow_address)
commands = []
threading.Thread(target=lambda: commands.extend(sys.stdin), daemon=True).start()
told = False
try:
    while True:
        lobby.check()
        for index in lobby.lost():
            say("lost", index)
        if lobby.state.asked_to_end and not told:
            say(lobby.state.asked_to_end)
            told = True
        if commands:
            word, _, rest = commands.pop(0).strip().partition(" ")
            if word == "finish":
                lobby.fail("", 0)
                sys.exit(0)
            if word == "leave":  # as at the end of the chief's program
                lobby.end_with_process()
                say("leaving")
                time.sleep(1.0)  # until the test has stopped this process
                sys.exit(0)
            if word == "restart":
                lobby.state.restart_code = int(rest.split()[1])
                say(word, rest)
            if word == "fail":
                lobby.fail(rest, 75)
                sys.exit(75)
            if word == "workers":
                say("workers", *sorted(k for job, k in lobby.state.serving if job == "worker"))
        time.sleep(0.01)
except ParameterServerError as error:
    lobby.fail(str(error))
    sys.exit(f"ParameterServerError: {error}")
