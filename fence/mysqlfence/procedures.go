package mysqlfence

// Both procedures find out whether they are in a transaction by trying to start another kind of one: the server answers
// 1400 inside a plain transaction, 1399 inside an XA transaction, and begins one where there is none (1440: another
// session is at the same point). They run with the rights of who installed them, so that a caller needs EXECUTE alone.
// A name that is too long is refused by its length: where sql_mode is lax, it would be cut, and be another's name.
const probeTransaction = `
  BEGIN
    DECLARE CONTINUE HANDLER FOR 1399 SET v_state = 1399;
    DECLARE CONTINUE HANDLER FOR 1400 SET v_state = 1400;
    DECLARE CONTINUE HANDLER FOR 1440 SET v_state = 1440;
    XA START 'aegis-probe';
  END;
  IF v_state = 0 THEN
    XA END 'aegis-probe';
    XA ROLLBACK 'aegis-probe';
  END IF;
  IF p_token IS NULL OR p_token < 1 OR p_token > 9007199254740991 THEN
    SET v_message = CONCAT('aegis: fenced: invalid token ', COALESCE(p_token, 'NULL'), ', must be 1 to 9007199254740991');
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_message;
  END IF;
  IF p_name IS NULL OR LENGTH(p_name) < 1 OR LENGTH(p_name) > 255 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'aegis: a name has 1 to 255 bytes';
  END IF;`

const admitProcedure = `CREATE PROCEDURE %aegis_admit(IN p_name VARBINARY(300), IN p_token BIGINT)
  MODIFIES SQL DATA SQL SECURITY DEFINER
  COMMENT 'aegis: first statement of a transaction: refuses it unless p_token is the newest of p_name'
BEGIN
  DECLARE v_state INT DEFAULT 0;
  DECLARE v_token BIGINT DEFAULT NULL;
  DECLARE v_message VARCHAR(128);` + probeTransaction + `
  IF v_state = 1399 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'aegis: an XA transaction is not admitted, its locks do not outlive XA PREPARE; use START TRANSACTION';
  END IF;
  IF v_state <> 1400 AND @@autocommit = 1 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'aegis: START TRANSACTION first: outside one the admission ends with this statement';
  END IF;
  SET v_token = (SELECT token FROM %aegis_fence WHERE name = p_name LOCK IN SHARE MODE);
  IF v_token IS NULL OR v_token <> p_token THEN
    SET v_message = CONCAT('aegis: fenced: token ', p_token, ' refused, the newest is ', COALESCE(v_token, 0));
    IF COALESCE(v_token, 0) < p_token THEN
      SET v_message = CONCAT(v_message, '; advance first');
    ELSE
      SET v_message = CONCAT(v_message, '; the term is over');
    END IF;
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_message;
  END IF;
END`

const advanceProcedure = `CREATE PROCEDURE %aegis_advance(IN p_name VARBINARY(300), IN p_token BIGINT, IN p_nonce BIGINT UNSIGNED, IN p_cluster BIGINT UNSIGNED)
  MODIFIES SQL DATA SQL SECURITY DEFINER
  COMMENT 'aegis: takes a term''s token, in a transaction of its own, before the term''s first read; nonce and cluster may be 0'
BEGIN
  DECLARE v_state INT DEFAULT 0;
  DECLARE v_token BIGINT;
  DECLARE v_nonce, v_cluster BIGINT UNSIGNED;
  DECLARE v_message VARCHAR(128);
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN IF v_state = 1 THEN ROLLBACK; END IF; RESIGNAL; END;` + probeTransaction + `
  IF v_state NOT IN (0, 1440) THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'aegis: advance is a transaction of its own; COMMIT or ROLLBACK first, and read afterwards';
  END IF;
  SET v_state = 1;
  START TRANSACTION;
  INSERT INTO %aegis_fence (name, token, nonce, cluster, node, at) VALUES (p_name, 0, 0, 0, '', UTC_TIMESTAMP(6))
    ON DUPLICATE KEY UPDATE token = token;
  SELECT token, nonce, cluster INTO v_token, v_nonce, v_cluster FROM %aegis_fence WHERE name = p_name LOCK IN SHARE MODE;
  IF v_cluster <> 0 AND p_cluster <> 0 AND v_cluster <> p_cluster THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'aegis: token of a foreign cluster: the name belongs to another etcd cluster';
  ELSEIF p_token < v_token THEN
    SET v_message = CONCAT('aegis: fenced: token ', p_token, ' refused, the newest is ', v_token, '; the term is over');
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_message;
  ELSEIF p_token = v_token AND v_nonce <> 0 AND p_nonce <> 0 AND v_nonce <> p_nonce THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'aegis: token went back: it was taken from another term; run aegis token raise --above N';
  ELSEIF p_token > v_token THEN
    UPDATE %aegis_fence SET token = p_token, nonce = COALESCE(p_nonce, 0), node = '', at = UTC_TIMESTAMP(6),
      cluster = IF(COALESCE(p_cluster, 0) = 0, v_cluster, p_cluster) WHERE name = p_name;
  END IF;
  COMMIT;
END`

func (g *Guard) procedures() []string {
	return []string{
		g.sql("DROP PROCEDURE IF EXISTS %aegis_admit"), g.sql(admitProcedure),
		g.sql("DROP PROCEDURE IF EXISTS %aegis_advance"), g.sql(advanceProcedure),
	}
}
