"""Routes of the page's buttons: requests to a run, commands that are checked and started, and their output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from unfog.errors import RequestError
from unfog.serve.answers import Json, json_body, run_of
from unfog.serve.run_detail import read_findings
from unfog.serve.runs import RunEntry
from unfog.serve.server import Server
from unfog.serve.steering import commands, forms


def steer_routes(server: Server) -> list[Route]:
    """Return the routes of buttons, forms and child processes."""

    async def ask(request: Request) -> Response:
        entry, body = run_of(server, request), await json_body(request)
        return Json(await asyncio.to_thread(commands.send_request, entry, body.get("what")))

    async def resume(request: Request) -> Response:
        entry, body = run_of(server, request), await json_body(request)
        if "finding" in body:  # its remedy, read on the server: the page names it only
            findings = read_findings(entry.path, server.newest_check(entry)) or []
            remedy = next((one["remedy"] for one in findings if one["id"] == body["finding"]), "")
            body = {"settings": commands.remedy_settings(remedy) or {}}
        return await _start(server, request, lambda: commands.resume_command(entry, body), entry)

    async def train(request: Request) -> Response:
        body = await json_body(request)
        return await _start(server, request, lambda: commands.train_command(server, body))

    async def doctor(request: Request) -> Response:
        body = await json_body(request)
        entry = None
        if "run" in body:
            try:
                entry = server.runs[body["run"]]
            except (KeyError, TypeError):
                raise RequestError("the run must be the number of one in the list") from None
        return await _start(server, request, lambda: commands.doctor_command(server, entry, body), entry)

    async def plan(request: Request) -> Response:
        body = await json_body(request)
        return await _start(server, request, lambda: commands.plan_command(server, body))

    async def settings(request: Request) -> Response:
        command = request.query_params.get("command", "train")
        return Json(await asyncio.to_thread(forms.form_fields, command))

    async def tasks(_: Request) -> Response:
        return Json([task.summary() for task in server.tasks.list()])

    async def task(request: Request) -> Response:
        one = server.tasks[request.path_params["task"]]
        return Json({**one.summary(), "output": await asyncio.to_thread(one.text)})

    async def stop(request: Request) -> Response:
        one = server.tasks[request.path_params["task"]]
        one.stop()
        return Json(one.summary())

    return [
        Route("/api/runs/{run:int}/ask", ask, methods=["POST"]),
        Route("/api/runs/{run:int}/resume", resume, methods=["POST"]),
        Route("/api/train", train, methods=["POST"]),
        Route("/api/doctor", doctor, methods=["POST"]),
        Route("/api/plan", plan, methods=["POST"]),
        Route("/api/settings", settings),
        Route("/api/tasks", tasks),
        Route("/api/tasks/{task:int}", task),
        Route("/api/tasks/{task:int}/stop", stop, methods=["POST"]),
    ]


async def _start(
    server: Server, request: Request, command: Callable[[], commands.Command], entry: RunEntry | None = None
) -> Response:
    """Check a command, and start it unless the page only asks what it would be."""
    made = await asyncio.to_thread(command)
    if request.query_params.get("dry"):
        return Json({"command": made.text})
    subject = entry.id if entry is not None else made.new_run
    task = await asyncio.to_thread(server.tasks.start, made.words, made.trains, made.result, subject)
    return Json({"task": task.id, "command": task.command})
