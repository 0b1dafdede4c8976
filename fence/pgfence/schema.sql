-- The fence of aegis for PostgreSQL 13 and later, version 1.
--
-- Run it as the role that shall own the fence, which should be neither the application's nor a superuser. It may be run
-- again at any time. Then grant an application role what it needs, and no more:
--
--   GRANT USAGE ON SCHEMA aegis TO app;
--   GRANT EXECUTE ON FUNCTION aegis.version, aegis.advance, aegis.admit, aegis.report, aegis.confirm, aegis.newest,
--     aegis.names, aegis.lock_of, aegis.blockers, aegis.once_begin, aegis.once_end TO app;
--
-- Refusals have SQLSTATEs of class ZF; DETAIL is a JSON object with name, token and newest:
--   ZF001 fenced: the token is not the newest that the fence has taken
--   ZF002 token went back: the newest was taken from another term
--   ZF003 foreign cluster: the name belongs to the tokens of another etcd cluster
--   ZF004 invalid: the token is outside 1 … 2^53-1, or the name is not one
--   ZF005 not admitted: the table is protected and this transaction was not admitted
--   ZF006 ended: the transaction that was admitted is not the one that shall commit

SELECT pg_advisory_xact_lock(4702111234474983745); -- one installer at a time

DO $aegis$
DECLARE installed int;
BEGIN
  IF to_regclass('aegis.meta') IS NULL THEN RETURN; END IF;
  EXECUTE 'SELECT value FROM aegis.meta WHERE key = ''version''' INTO installed;
  IF installed > 1 THEN
    RAISE EXCEPTION 'the schema aegis of this database is of version %, this program knows version 1', installed
      USING ERRCODE = 'ZF007', HINT = 'use a newer aegis';
  END IF;
END $aegis$;

CREATE SCHEMA IF NOT EXISTS aegis;
CREATE TABLE IF NOT EXISTS aegis.meta (key text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO aegis.meta VALUES ('version', 1) ON CONFLICT (key) DO UPDATE SET value = 1;

-- nonce and cluster are the 64 bits of Go's uint64; node and at are for people.
CREATE TABLE IF NOT EXISTS aegis.fence (
  name    text COLLATE "C" PRIMARY KEY,
  token   bigint NOT NULL CHECK (token BETWEEN 1 AND 9007199254740991),
  nonce   bigint NOT NULL,
  cluster bigint NOT NULL,
  node    text NOT NULL,
  at      timestamptz NOT NULL
) WITH (fillfactor = 10); -- few rows, locked by every write: room for the versions of each on its own page
-- The largest token of each cluster whose name was forgotten: what no name without a record may take any more.
CREATE TABLE IF NOT EXISTS aegis.floor (cluster bigint PRIMARY KEY, token bigint NOT NULL);
CREATE TABLE IF NOT EXISTS aegis.once (
  name   text COLLATE "C" NOT NULL,
  key    text COLLATE "C" NOT NULL,
  token  bigint NOT NULL,
  result bytea,
  at     timestamptz NOT NULL,
  PRIMARY KEY (name, key)
);
CREATE INDEX IF NOT EXISTS once_at ON aegis.once (at);

CREATE OR REPLACE FUNCTION aegis.version() RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS
$aegis$ SELECT value FROM aegis.meta WHERE key = 'version' $aegis$;

-- The advisory lock of a name. Two names of one hash queue behind each other, which does no harm.
CREATE OR REPLACE FUNCTION aegis.lock_of(name text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$aegis$ SELECT pg_catalog.hashtextextended($1 COLLATE "C", 4702111234474983745) $aegis$;

-- Raises unless name and token can be ones.
CREATE OR REPLACE FUNCTION aegis.check_term(name text, token bigint) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $aegis$
BEGIN
  IF token IS NULL OR token NOT BETWEEN 1 AND 9007199254740991 THEN
    RAISE EXCEPTION 'fenced: invalid token: % is outside 1 … 9007199254740991', coalesce(token::text, 'NULL')
      USING ERRCODE = 'ZF004', DETAIL = json_build_object('name', name, 'token', token)::text,
            HINT = 'the token is the number that the election gave to this term';
  END IF;
  IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN
    RAISE EXCEPTION 'fenced: a name has 1 to 255 bytes, this one has %', coalesce(octet_length(name)::text, 'none: it is NULL')
      USING ERRCODE = 'ZF004', DETAIL = json_build_object('name', name, 'token', token)::text;
  END IF;
END $aegis$;

-- Raises the reason why a term is refused; newest is null where there is no record.
CREATE OR REPLACE FUNCTION aegis.refuse(name text, token bigint, cluster bigint, newest bigint, known_cluster bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE detail text := json_build_object('name', name, 'token', token, 'newest', coalesce(newest, 0));
BEGIN
  IF known_cluster <> 0 AND cluster <> 0 AND known_cluster <> cluster THEN
    RAISE EXCEPTION 'token of a foreign cluster: "%" belongs to etcd cluster % at this guard, the token comes from cluster %',
        name, to_hex(known_cluster), to_hex(cluster)
      USING ERRCODE = 'ZF003', DETAIL = (detail::jsonb || jsonb_build_object('cluster', to_hex(cluster), 'known_cluster', to_hex(known_cluster)))::text,
            HINT = 'check the endpoints; docs/guide.md says how to move a guard to another cluster';
  ELSIF token = newest THEN
    RAISE EXCEPTION 'token went back: "%" was given token %, but the guard has already taken % from another term', name, token, newest
      USING ERRCODE = 'ZF002', DETAIL = detail,
            HINT = format('etcd seems restored from a snapshot: stop the writers and run `aegis token raise --above %s`', newest);
  ELSIF newest IS NULL THEN
    RAISE EXCEPTION 'fenced: "%" token % refused: the guard has taken no token yet', name, token
      USING ERRCODE = 'ZF001', DETAIL = detail,
            HINT = format('SELECT aegis.advance(%L, %s), in a transaction of its own, before the first read and write of the term', name, token);
  ELSIF token > newest THEN
    RAISE EXCEPTION 'fenced: "%" token % refused: the guard''s newest is %', name, token, newest
      USING ERRCODE = 'ZF001', DETAIL = detail,
            HINT = format('SELECT aegis.advance(%L, %s), in a transaction of its own, before the first read and write of the term', name, token);
  END IF;
  RAISE EXCEPTION 'fenced: "%" token % refused: the guard''s newest is %', name, token, newest
    USING ERRCODE = 'ZF001', DETAIL = detail, HINT = 'the term is over: roll back and stop its work';
END $aegis$;

-- Takes the token of a new term. It belongs into a transaction of its own, committed before the new term's first read:
-- a read in the same transaction or statement may be older than the old term's last write.
CREATE OR REPLACE FUNCTION aegis.advance(name text, token bigint, nonce bigint DEFAULT 0, cluster bigint DEFAULT 0, node text DEFAULT '')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE
  f aegis.fence;
  lowest bigint;
BEGIN
  PERFORM aegis.check_term(name, token);
  IF current_setting('synchronous_commit') = 'off' THEN
    PERFORM set_config('synchronous_commit', 'on', true); -- a token that was taken must not be forgotten by a crash
  END IF;
  PERFORM pg_advisory_xact_lock(aegis.lock_of(name)); -- waits for every admitted transaction to end
  SELECT * INTO f FROM aegis.fence x WHERE x.name = advance.name COLLATE "C" FOR UPDATE;
  IF NOT FOUND THEN
    SELECT max(x.token) INTO lowest FROM aegis.floor x WHERE x.cluster = advance.cluster OR advance.cluster = 0;
    IF token <= lowest THEN
      RAISE EXCEPTION 'fenced: "%" token % refused: the guard''s newest is %', name, token, lowest
        USING ERRCODE = 'ZF001', DETAIL = json_build_object('name', name, 'token', token, 'newest', lowest)::text,
              HINT = 'names were forgotten here, and with them all tokens up to this one: a new term gets a greater token';
    END IF;
    INSERT INTO aegis.fence VALUES (name, token, nonce, cluster, node, clock_timestamp()) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
      RAISE EXCEPTION 'aegis.advance: the snapshot is older than the record of "%"', name
        USING ERRCODE = '40001', HINT = 'advance in a transaction of its own';
    END IF;
  ELSIF (f.cluster <> 0 AND cluster <> 0 AND f.cluster <> cluster) OR token < f.token
     OR (token = f.token AND f.nonce <> 0 AND nonce <> 0 AND f.nonce <> nonce) THEN
    PERFORM aegis.refuse(name, token, cluster, f.token, f.cluster);
  ELSIF token > f.token THEN
    UPDATE aegis.fence x SET token = advance.token, nonce = advance.nonce, node = advance.node, at = clock_timestamp(),
        cluster = CASE advance.cluster WHEN 0 THEN x.cluster ELSE advance.cluster END
      WHERE x.name = advance.name COLLATE "C";
  END IF;
  RETURN token;
END $aegis$;

-- Admits this transaction to write under the term, up to its end; raises if the token is not the newest. Run it as the
-- first statement of the transaction and outside of savepoints and EXCEPTION blocks. It returns the token.
--
-- The advisory lock makes the queue fair: who asks for it shared waits behind an advance that waits for it. The row's
-- lock makes the comparison right at every isolation level: a row that was changed after the transaction's snapshot is
-- a serialization failure. Both last to the commit.
CREATE OR REPLACE FUNCTION aegis.admit(name text, token bigint, nonce bigint DEFAULT 0, cluster bigint DEFAULT 0)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE
  newest bigint;
  known_nonce bigint;
  known_cluster bigint;
  terms text;
BEGIN
  -- Expressions instead of PERFORM, and no JSON functions, halve what it costs.
  IF (token BETWEEN 1 AND 9007199254740991 AND octet_length(name) BETWEEN 1 AND 255) IS NOT TRUE THEN
    PERFORM aegis.check_term(name, token);
  ELSIF pg_advisory_xact_lock_shared(hashtextextended(name COLLATE "C", 4702111234474983745)) IS NOT NULL THEN
    -- A statement of its own: at READ COMMITTED its snapshot is younger than the lock.
    SELECT f.token, f.nonce, f.cluster INTO newest, known_nonce, known_cluster
      FROM aegis.fence f WHERE f.name = admit.name COLLATE "C" FOR SHARE;
  END IF;
  IF newest IS NULL OR newest <> token OR (known_cluster <> cluster AND known_cluster <> 0 AND cluster <> 0)
     OR (known_nonce <> nonce AND known_nonce <> 0 AND nonce <> 0) THEN
    PERFORM aegis.refuse(name, token, cluster, newest, known_cluster);
  END IF;
  -- For the triggers of aegis.protect, which admit again with it, and for aegis.confirm.
  terms := current_setting('aegis.terms', true);
  IF terms IS NULL OR terms = '' THEN
    terms := set_config('aegis.terms', concat('{', to_json(name), ': [', token, ', ', nonce, ', ', cluster, ']}'), true);
  ELSIF terms::jsonb -> name IS DISTINCT FROM jsonb_build_array(token, nonce, cluster) THEN
    PERFORM set_config('aegis.terms', (terms::jsonb || jsonb_build_object(name, jsonb_build_array(token, nonce, cluster)))::text, true);
  END IF;
  RETURN token;
END $aegis$;

-- admit for report mode: returns the refusal instead of raising it, null if there is none.
CREATE OR REPLACE FUNCTION aegis.report(name text, token bigint, nonce bigint DEFAULT 0, cluster bigint DEFAULT 0)
RETURNS text LANGUAGE plpgsql AS $aegis$
DECLARE state text; detail text;
BEGIN
  PERFORM aegis.admit(name, token, nonce, cluster);
  RETURN NULL;
EXCEPTION WHEN SQLSTATE 'ZF001' OR SQLSTATE 'ZF002' OR SQLSTATE 'ZF003' THEN
  GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, detail = PG_EXCEPTION_DETAIL;
  RETURN state || detail;
END $aegis$;

-- Raises unless this very transaction was admitted under the term and the admission has not been rolled back: then its
-- locks are still held. Run it as the last statement before COMMIT.
CREATE OR REPLACE FUNCTION aegis.confirm(name text, token bigint) RETURNS void
LANGUAGE plpgsql AS $aegis$
BEGIN
  IF pg_catalog.starts_with(pg_catalog.current_setting('aegis.terms', true), pg_catalog.concat('{', pg_catalog.to_json(name), ': [', token, ', ')) THEN
    RETURN; -- as admit of one election left it
  END IF;
  IF (nullif(pg_catalog.current_setting('aegis.terms', true), '')::jsonb OPERATOR(pg_catalog.->) name OPERATOR(pg_catalog.->>) 0)
      IS DISTINCT FROM token::text THEN
    RAISE EXCEPTION 'aegis: this transaction is not the one that was admitted for "%" under token %', name, token
      USING ERRCODE = 'ZF006', HINT = 'something ended the transaction, or rolled its admission back: roll back and start anew';
  END IF;
END $aegis$;

CREATE OR REPLACE FUNCTION aegis.newest(name text, OUT token bigint, OUT nonce bigint, OUT cluster bigint) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS
$aegis$ SELECT f.token, f.nonce, f.cluster FROM aegis.fence f WHERE f.name = $1 COLLATE "C" $aegis$;

CREATE OR REPLACE FUNCTION aegis.names() RETURNS SETOF aegis.fence
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS
$aegis$ SELECT * FROM aegis.fence ORDER BY name $aegis$;

-- The sessions and prepared transactions that hold an advance of the name off. What it shows of other roles' sessions is
-- what pg_stat_activity shows to the caller.
CREATE OR REPLACE FUNCTION aegis.blockers(name text, OUT pid int, OUT gid text, OUT role text, OUT application text,
  OUT client text, OUT state text, OUT since timestamptz, OUT query text) RETURNS SETOF record
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $aegis$
  SELECT l.pid, p.gid, coalesce(a.usename, p.owner)::text, a.application_name, host(a.client_addr),
         coalesce(a.state, 'prepared'), coalesce(a.xact_start, p.prepared), a.query
  FROM pg_locks l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN pg_locks x ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction
  LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
  WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND ((l.classid::bigint << 32) | l.objid::bigint) = aegis.lock_of($1)
    AND l.pid IS DISTINCT FROM pg_backend_pid()
  ORDER BY 7
$aegis$;

-- Once, for any language: admits; first is true if the key is new, and then the caller does its work and ends with
-- once_end, in the same transaction. Else result is the first one's.
CREATE OR REPLACE FUNCTION aegis.once_begin(name text, token bigint, key text, nonce bigint DEFAULT 0, cluster bigint DEFAULT 0,
  OUT first boolean, OUT result bytea) RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $aegis$
BEGIN
  IF key IS NULL OR key = '' THEN
    RAISE EXCEPTION 'aegis.once_begin: the key is empty' USING ERRCODE = '22023';
  END IF;
  PERFORM aegis.admit(name, token, nonce, cluster);
  INSERT INTO aegis.once VALUES (name, key, token, NULL, clock_timestamp()) ON CONFLICT DO NOTHING; -- waits for a rival
  first := FOUND;
  IF NOT first THEN
    SELECT o.result INTO result FROM aegis.once o WHERE o.name = once_begin.name COLLATE "C" AND o.key = once_begin.key COLLATE "C";
  END IF;
END $aegis$;

CREATE OR REPLACE FUNCTION aegis.once_end(name text, token bigint, key text, result bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $aegis$
BEGIN
  PERFORM aegis.confirm(name, token);
  -- Only the transaction that made the record may end it: a committed one is never changed.
  UPDATE aegis.once o SET result = once_end.result
    WHERE o.name = once_end.name COLLATE "C" AND o.key = once_end.key COLLATE "C" AND o.xmin = pg_current_xact_id()::xid;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'aegis.once_end: this transaction has not begun the key "%" of "%"', key, name
      USING ERRCODE = 'ZF006', HINT = 'once_begin, the work and once_end belong into one transaction';
  END IF;
END $aegis$;

-- Removes records of once_begin older than before: a repeat of such a key would run again. For the owner.
CREATE OR REPLACE FUNCTION aegis.forget(before timestamptz) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE n bigint;
BEGIN
  DELETE FROM aegis.once o WHERE o.at < before;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END $aegis$;

-- Removes the record of a name that no term uses any more. No old token gets in by that: whatever was given out up to
-- the forgotten one is refused from then on for every name without a record. For the owner.
CREATE OR REPLACE FUNCTION aegis.forget_name(name text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE f aegis.fence;
BEGIN
  PERFORM pg_advisory_xact_lock(aegis.lock_of(name));
  DELETE FROM aegis.fence x WHERE x.name = forget_name.name COLLATE "C" RETURNING * INTO f;
  IF NOT FOUND THEN RETURN false; END IF;
  IF f.cluster = 0 THEN
    RAISE EXCEPTION 'aegis.forget_name: the tokens of "%" are of no known cluster', name
      USING ERRCODE = '55000', HINT = 'they may come from a counter of this name alone, and the record is all that remembers it';
  END IF;
  INSERT INTO aegis.floor VALUES (f.cluster, f.token)
    ON CONFLICT (cluster) DO UPDATE SET token = greatest(aegis.floor.token, excluded.token);
  RETURN true;
END $aegis$;

-- The audited way down: the name is as if never advanced, and whatever token comes first is taken. For the owner.
CREATE OR REPLACE FUNCTION aegis.reset(name text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $aegis$
BEGIN
  PERFORM pg_advisory_xact_lock(aegis.lock_of(name));
  DELETE FROM aegis.fence x WHERE x.name = reset.name COLLATE "C";
  RETURN FOUND;
END $aegis$;

-- The trigger of protected tables. It trusts no flag: it admits, with the token that the transaction was admitted under.
CREATE OR REPLACE FUNCTION aegis.guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE term jsonb := nullif(current_setting('aegis.terms', true), '')::jsonb -> TG_ARGV[0];
BEGIN
  IF term IS NULL THEN
    RAISE EXCEPTION 'fenced: % of %.% refused: the table is protected by "%", and this transaction was not admitted for it',
        TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_ARGV[0]
      USING ERRCODE = 'ZF005', DETAIL = json_build_object('name', TG_ARGV[0])::text, SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
            HINT = format('SELECT aegis.admit(%L, <token>) as the first statement of the transaction; the owner lifts the protection with aegis.unprotect(%L, %L)',
                          TG_ARGV[0], format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), TG_ARGV[0]);
  END IF;
  PERFORM aegis.admit(TG_ARGV[0], (term ->> 0)::bigint, (term ->> 1)::bigint, (term ->> 2)::bigint);
  IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
  RETURN NEW;
END $aegis$;

-- Has every change of the table, its partitions and its children refused unless the transaction was admitted for the
-- election. For the table's owner, and again after a partition was added.
CREATE OR REPLACE FUNCTION aegis.protect(target regclass, election text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE
  base text := 'aegis_' || left(md5(election), 16);
  t regclass;
  kind text;
  how text;
BEGIN
  PERFORM aegis.check_term(election, 1);
  FOR t IN WITH RECURSIVE tree(relid) AS (SELECT target::oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.relid)
           SELECT relid::regclass FROM tree LOOP
    SELECT relkind INTO kind FROM pg_class WHERE oid = t;
    IF kind NOT IN ('r', 'p') THEN
      RAISE EXCEPTION 'aegis.protect: % is not a table', t USING ERRCODE = '42809', HINT = 'protect the tables behind it';
    END IF;
    FOREACH how IN ARRAY ARRAY['INSERT OR UPDATE OR DELETE', 'TRUNCATE'] LOOP
      IF NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = t AND g.tgname = base || '_' || lower(left(how, 1))) THEN
        EXECUTE format('CREATE TRIGGER %I BEFORE %s ON %s FOR EACH STATEMENT EXECUTE FUNCTION aegis.guard(%L)',
                       base || '_' || lower(left(how, 1)), how, t, election);
      END IF;
      EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', t, base || '_' || lower(left(how, 1)));
    END LOOP;
  END LOOP;
  -- Statement triggers are not inherited by the partitions of tomorrow; row triggers are.
  SELECT relkind INTO kind FROM pg_class WHERE oid = target;
  IF kind = 'p' THEN
    IF NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = target AND g.tgname = base || '_r') THEN
      EXECUTE format('CREATE TRIGGER %I BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION aegis.guard(%L)',
                     base || '_r', target, election);
    END IF;
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', target, base || '_r');
  END IF;
END $aegis$;

CREATE OR REPLACE FUNCTION aegis.unprotect(target regclass, election text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $aegis$
DECLARE g record;
BEGIN
  FOR g IN WITH RECURSIVE tree(relid) AS (SELECT target::oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.relid)
           SELECT tgrelid::regclass AS t, tgname FROM pg_trigger JOIN tree ON tgrelid = relid
           WHERE tgfoid = 'aegis.guard'::regproc AND tgparentid = 0
             AND tgname LIKE 'aegis\_' || left(md5(election), 16) || '\__' LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', g.tgname, g.t);
  END LOOP;
END $aegis$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA aegis FROM PUBLIC;
