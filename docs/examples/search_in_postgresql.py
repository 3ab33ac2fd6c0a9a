import psycopg

db = psycopg.connect("dbname=birds", autocommit=True)
db.execute("CREATE EXTENSION IF NOT EXISTS vector")
db.execute("CREATE TABLE birds (id text PRIMARY KEY, point vector(128))")
rows = [(row["id"], str(row["vector"])) for row in gallery.to_pylist()]
db.cursor().executemany("INSERT INTO birds VALUES (%s, %s)", rows)
db.execute("CREATE INDEX ON birds USING hnsw (point vector_l2_ops)")
db.execute("SET hnsw.ef_search = 100")


def in_postgres(centre):
    order = "SELECT id, point::real[] FROM birds ORDER BY point <-> %s::vector LIMIT 100"
    ids, points = zip(*db.execute(order, [str(centre.tolist())]))
    return np.array(ids), np.array(points)


print(nearest(in_postgres, q))
