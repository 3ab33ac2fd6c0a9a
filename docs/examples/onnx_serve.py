import http.server
import io
import json
import sys

import numpy as np
from PIL import Image
from search import distances, embed, embed_folder, space

paths, gallery = embed_folder(sys.argv[1])


class Search(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            length = int(self.headers.get("Content-Length", 0))
            image = Image.open(io.BytesIO(self.rfile.read(min(max(length, 0), 20_000_000))))
            (row,) = distances(embed(image), gallery, space)
            nearest = np.argsort(row, kind="stable")[:10].tolist()
            status, answer = 200, [[str(paths[i]), row[i]] for i in nearest]
        except Exception:  # Pillow raises many types on damaged files.
            status, answer = 400, {"error": "this is no image of at most 20 MB"}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


if __name__ == "__main__":
    print(f"serving {len(paths)} images on http://localhost:8000")
    http.server.ThreadingHTTPServer(("localhost", 8000), Search).serve_forever()
