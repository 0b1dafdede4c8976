-- The leader of term 451 takes the fence, in a transaction of its own, before its first read.
SELECT aegis.advance('boss', 451);
-- It writes: admit first, then the work.
BEGIN;
SELECT aegis.admit('boss', 451);
INSERT INTO loot (item) VALUES ('sword');
COMMIT;
-- One statement will do; it must read from the CTE.
WITH ok AS (SELECT aegis.admit('boss', 451))
INSERT INTO loot (item) SELECT 'shield' FROM ok;
-- Another process is elected, with token 453.
SELECT aegis.advance('boss', 453);
-- The old leader wakes up and goes on.
BEGIN;
SELECT aegis.admit('boss', 451);
INSERT INTO loot (item) VALUES ('sword once more');
COMMIT;
WITH ok AS (SELECT aegis.admit('boss', 451))
INSERT INTO loot (item) SELECT 'shield once more' FROM ok;
-- Nor does it come back by advancing, nor by making a token up.
SELECT aegis.advance('boss', 451);
SELECT aegis.admit('boss', 999);
-- A programmer forgets the guard: so that this is an error, the table's owner protects it.
SELECT aegis.protect('loot', 'boss');
UPDATE loot SET item = 'nothing';
TRUNCATE loot;
BEGIN;
SELECT aegis.admit('boss', 453);
UPDATE loot SET item = 'a good ' || item;
SELECT aegis.confirm('boss', 453);
COMMIT;
SELECT item FROM loot ORDER BY id;
-- A settlement that is done once, by any language: work only if first is t, and end with once_end.
BEGIN;
SELECT * FROM aegis.once_begin('boss', 453, 'kill-4711');
INSERT INTO loot (item) VALUES ('crown');
SELECT aegis.once_end('boss', 453, 'kill-4711', 'crown for Ayla');
COMMIT;
BEGIN;
SELECT first, convert_from(result, 'UTF8') AS result FROM aegis.once_begin('boss', 453, 'kill-4711');
COMMIT;
