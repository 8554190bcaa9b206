"""Routes of the playground: drawings, their steps and pictures, uploads, and blind comparisons."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from unfog import __version__
from unfog.errors import RequestError
from unfog.reporting.channel_sheets import decode_channels
from unfog.reporting.image_grids import Pixels, encode_png
from unfog.serve.playground import blind_comparison, images
from unfog.serve.playground.drawing import (
    GRIDS,
    MOST_IMAGES,
    SAMPLERS,
    Drawing,
    History,
    StoredDrawing,
    read_request,
    settings_of,
)
from unfog.serve.playground.given_pictures import check_pictures, condition_view, mask_file, picture_column
from unfog.serve.playground.images import Uploads
from unfog.serve.playground.inputs import Inputs
from unfog.serve.playground.queue import MOST_WAITING, DrawingQueue
from unfog.serve.run_files import conditions_of
from unfog.serve.server import Json, Server, json_body, whole_number
from unfog.values.condition_kinds import ColumnFacts


def playground_routes(server: Server) -> list[Route]:
    """Return the routes of the playground of a server, and let it end the worker when it closes."""
    playground = _Playground(server)
    return [
        Route("/api/draw", playground.list),
        Route("/api/draw", playground.draw, methods=["POST"]),
        Route("/api/draw/rare-words", playground.rare_words),
        Route("/api/draw/{job:number}", playground.job),
        Route("/api/draw/{job:number}/cancel", playground.cancel, methods=["POST"]),
        Route("/api/draw/{job:number}/copies", playground.copies, methods=["POST"]),
        Route("/api/draw/{job:number}/steps/{step:number}.webp", playground.step),
        Route("/api/draw/{job:number}/pictures.webp", playground.pictures),
        Route("/api/draw/{job:number}/nearest.webp", playground.nearest),
        Route("/api/draw/{job:number}/disagreement.webp", playground.disagreement),
        Route("/api/draw/{job:number}/given.webp", playground.given),
        Route("/api/draw/{job:number}/channels.json", playground.channels),
        Route("/api/draw/{job:number}/values.npy", playground.values),
        Route("/api/draw/{job:number}/{picture:number}.png", playground.picture),
        Route("/api/upload", playground.upload, methods=["POST"]),
        Route("/api/upload/{upload:number}.png", playground.uploaded),
        Route("/api/blind", playground.votes),
        Route("/api/blind", playground.vote, methods=["POST"]),
        Route("/api/worker/stop", playground.stop_worker, methods=["POST"]),
    ]


class _Playground:
    def __init__(self, server: Server) -> None:
        self._server = server
        self.jobs = DrawingQueue(
            lambda progress: server.hub.publish("draw", progress, f"draw {progress['job']}"),
            lambda: any(run.running for run in server.runs),
            restore=self._restored,
            keep=self._store,
        )
        self._history = History(server.folder)
        self.uploads = Uploads()
        server.on_close.append(self.jobs.close)

    def _store(self, job: Drawing) -> None:
        if job.pictures is None:
            return
        facts = {"run": job.run, "key": job.key, "settings": settings_of(job.request), "facts": job.facts}
        facts["inputs"] = [job.request.image is not None, job.request.mask is not None]
        given = b"" if job.given is None else job.given.tobytes()
        parts = (job.inputs.body, given, job.channels, job.values)
        facts |= {"parts": [len(part) for part in parts], "head": job.inputs.head}
        self._history.add(StoredDrawing(job.id, facts, job.pictures, b"".join(parts)))

    def _restored(self) -> Iterator[Drawing]:
        """Yield the drawings of an earlier server, of runs that are still here."""
        for number, facts, pictures, rest in self._history.read():
            with suppress(KeyError, TypeError, ValueError, RequestError):
                run = self._server.runs[facts["run"]]
                asked = read_request(run.path, facts["settings"], *facts["inputs"])
                job = Drawing(number, run.id, run.name, asked, str(facts["key"]), state="done", pictures=pictures)
                job.facts = dict(facts["facts"])
                if "parts" in facts:  # earlier versions kept pixels alone
                    ends = [0, *itertools.accumulate(int(length) for length in facts["parts"])]
                    body, given, job.channels, job.values = (rest[a:b] for a, b in itertools.pairwise(ends))
                    job.inputs = Inputs.read(facts["head"], body)
                    if given:
                        job.given = np.frombuffer(given, np.uint8).reshape(job.facts["given_shape"])
                yield job

    async def list(self, _: Request) -> Response:
        jobs, training = self.jobs, any(run.running for run in self._server.runs)
        worker = {"pid": jobs.worker.pid, "nice": jobs.worker.nice, "seconds": round(jobs.busy_seconds, 1)}
        facts = {"samplers": SAMPLERS, "grids": GRIDS, "most_images": MOST_IMAGES, "most_waiting": MOST_WAITING}
        listed = await asyncio.to_thread(lambda: [job.summary() for job in jobs.list()])
        return Json({"jobs": listed, "worker": worker, "training": training, **facts})

    async def draw(self, request: Request) -> Response:
        body = await json_body(request)
        run = self._run(body.get("run"))
        job = await asyncio.to_thread(self._submit, run, body)
        return Json(await asyncio.to_thread(job.detail))

    def _submit(self, run: Any, body: dict[str, Any]) -> Drawing:
        settings = body.get("settings", {})
        if not isinstance(settings, dict):
            raise RequestError("settings must be an object")
        image, mask = body.get("image"), body.get("mask")
        if mask is not None and image is None:
            raise RequestError("a mask needs an image to paint in")
        conditions, pictures = conditions_of(run.path), body.get("pictures") or {}
        columns = check_pictures(conditions, pictures)
        given = {name: self._given_file(columns[name], pictures[name]) for name in sorted(columns)}
        first = second = b""
        if image is not None:
            pixels = self._image(image)
            format = images.format_for(run.path, pixels)
            first = encode_png(images.at_run_size(pixels, format))
            if mask is not None:
                second = encode_png(images.at_run_size(self._image(mask), format.as_mask))
        asked = read_request(run.path, settings, image is not None, mask is not None)
        newest = settings.get("checkpoint") is None and asked.checkpoint is not None
        return self.jobs.submit(run.id, run.name, asked, Inputs(first, second, given), newest)

    def _given_file(self, column: ColumnFacts, named: Any) -> bytes:
        """Return the file of a condition: an upload, a painted mask, or that of an earlier drawing."""
        match named:
            case {"upload": int(number), "painted": True} if column.kind == "mask":
                return mask_file(self.uploads[number].pixels, column)
            case {"upload": int(number)}:
                return self.uploads[number].data
            case {"job": int(number)}:
                given = self._job(number).inputs.given
                if column.name in given:
                    return given[column.name]
                raise RequestError(f"drawing {number} keeps no picture of {column.name}; upload it again")
        raise RequestError('the picture of a condition is {"upload": NUMBER} or {"job": NUMBER}')

    def _image(self, named: Any) -> Pixels:
        """Return an uploaded image, or a picture of a job, by its number."""
        match named:
            case {"upload": int(number)}:
                return self.uploads[number].pixels
            case {"job": int(number), "picture": int(picture)}:
                drawn: Pixels = self._pictures(self._job(number))[self._index(number, picture)]
                return drawn
        raise RequestError('an image is {"upload": NUMBER} or {"job": NUMBER, "picture": NUMBER}')

    async def rare_words(self, request: Request) -> Response:
        run, text = self._run(whole_number(request, "run")), request.query_params.get("text", "")
        return Json(await asyncio.to_thread(lambda: conditions_of(run.path).rare_words(text)))

    async def job(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        return Json(await asyncio.to_thread(job.detail))

    async def cancel(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        return Json(await asyncio.to_thread(lambda: self.jobs.cancel(job.id).summary()))

    async def copies(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        return Json(await asyncio.to_thread(lambda: self.jobs.find_copies(job.id).detail()))

    async def step(self, request: Request) -> Response:
        job, number = self._job(request.path_params["job"]), request.path_params["step"]
        guess = request.query_params.get("what", "x") == "x0"
        data = await asyncio.to_thread(images.step_sheet, job, number, guess)
        if data is None:
            raise HTTPException(404, "this step is not there yet")
        return _picture(data)

    async def pictures(self, request: Request) -> Response:
        pictures = self._pictures(self._job(request.path_params["job"]))
        return _picture(await asyncio.to_thread(images.sheet, list(pictures)))

    async def given(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        if job.given is None:
            raise HTTPException(404, "this drawing has no conditions that are images, or is not begun")
        return _picture(await asyncio.to_thread(images.sheet, list(job.given), len(job.given)))

    async def channels(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        found = await self._server.pictures.decode(lambda: decode_channels(job.channels))
        if found is None:
            raise HTTPException(404, "this drawing has no channels")
        return Json(found)

    async def values(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        if "values" not in job.facts or not job.values:
            raise HTTPException(404, "the samples of this drawing are pictures of 8 bits")
        data = await asyncio.to_thread(images.npy, job.values, job.facts["values"])
        name = f'attachment; filename="drawing-{job.id}.npy"'
        return Response(data, media_type="application/octet-stream", headers={"content-disposition": name})

    async def nearest(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        if job.nearest is None:
            raise HTTPException(404, "the training images were not searched yet")
        return _picture(await asyncio.to_thread(images.sheet, list(job.nearest), int(job.copies["shown"])))

    async def disagreement(self, request: Request) -> Response:
        pictures = self._pictures(self._job(request.path_params["job"]))
        return _picture(await asyncio.to_thread(lambda: images.webp(images.disagreement(pictures))))

    async def picture(self, request: Request) -> Response:
        job = self._job(request.path_params["job"])
        index = self._index(job.id, request.path_params["picture"])
        about = {"unfog": __version__, "run": job.run_name, "picture": index, "settings": settings_of(job.request)}
        data = await asyncio.to_thread(encode_png, self._pictures(job)[index], {"Unfog": json.dumps(about)})
        name = f'attachment; filename="picture-{job.id}-{index}.png"'
        return Response(data, media_type="image/png", headers={"content-disposition": name})

    async def upload(self, request: Request) -> Response:
        body = await request.body()
        number, upload = await self._server.pictures.decode(lambda: self.uploads.add(body))
        return Json({"upload": number, "width": upload.width, "height": upload.height, "settings": upload.settings})

    async def uploaded(self, request: Request) -> Response:
        upload = self.uploads[request.path_params["upload"]]
        run, name = self._run(whole_number(request, "run")), request.query_params.get("given")

        def made() -> bytes:
            if name is None:
                pixels = upload.pixels
                return encode_png(images.at_run_size(pixels, images.format_for(run.path, pixels)))
            return condition_view(upload.data, picture_column(conditions_of(run.path), name))

        return Response(await self._server.pictures.decode(made), media_type="image/png")

    async def votes(self, request: Request) -> Response:
        run = self._run(whole_number(request, "run"))
        return Json(await asyncio.to_thread(blind_comparison.tallies, run.path))

    async def vote(self, request: Request) -> Response:
        body = await json_body(request)
        first, second = (self._job(body.get(name)) for name in ("first", "second"))
        index = self._index(first.id, body.get("picture"))
        self._index(second.id, index)
        if first.run != second.run:
            raise RequestError("both drawings of a comparison must be of one run")
        run = self._run(first.run)
        add = lambda: blind_comparison.add_vote(run.path, first.request, second.request, index, body.get("choice"))  # noqa: E731
        return Json(await asyncio.to_thread(add))

    async def stop_worker(self, _: Request) -> Response:
        await asyncio.to_thread(self.jobs.end_worker)
        return Json({"stopped": True})

    def _run(self, number: Any) -> Any:
        try:
            return self._server.runs[number]
        except (KeyError, TypeError):
            raise HTTPException(404, "there is no such run any more; reload the list") from None

    def _job(self, number: Any) -> Drawing:
        try:
            return self.jobs[number]
        except (KeyError, TypeError):
            raise HTTPException(404, "there is no such drawing any more; draw it again") from None

    def _pictures(self, job: Drawing) -> Pixels:
        if job.pictures is None:
            raise HTTPException(404, "these pictures are not finished")
        return job.pictures

    def _index(self, number: int, picture: Any) -> int:
        count = len(self._pictures(self._job(number)))
        if not (isinstance(picture, int) and 0 <= picture < count):
            raise HTTPException(404, "there is no such picture")
        return picture


def _picture(data: bytes) -> Response:
    return Response(data, media_type="image/webp", headers={"cache-control": "private, no-store"})
