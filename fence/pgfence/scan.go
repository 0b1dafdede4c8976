package pgfence

import (
	"fmt"
	"strings"
)

// transactionControl returns the command in sql that would end a transaction, "" if there is none. It sees the first
// words of each statement; functions and procedures cannot end the transaction that they run in.
func transactionControl(sql string) string {
	inFunction := false
	for {
		word, rest := firstWord(sql)
		switch word {
		case "":
			if rest == "" {
				return ""
			}
		case "COMMIT", "ABORT", "BEGIN", "START":
			return word
		case "END":
			if !inFunction { // of CREATE FUNCTION … BEGIN ATOMIC …; END
				return word
			}
		case "CREATE":
			next, r := firstWord(rest)
			if next == "OR" {
				_, r = firstWord(r)
				next, _ = firstWord(r)
			}
			inFunction = inFunction || next == "FUNCTION" || next == "PROCEDURE"
		case "ROLLBACK":
			next, r := firstWord(rest)
			if next == "WORK" || next == "TRANSACTION" {
				next, _ = firstWord(r)
			}
			if next != "TO" {
				return word
			}
		case "PREPARE":
			if next, _ := firstWord(rest); next == "TRANSACTION" {
				return "PREPARE TRANSACTION"
			}
		}
		i := semicolon(rest)
		if i < 0 {
			return ""
		}
		sql = rest[i+1:]
	}
}

func controlError(word string) error {
	if word == "PREPARE TRANSACTION" {
		return fmt.Errorf("pgfence: PREPARE TRANSACTION refused: a prepared transaction keeps the fence locked after its session, and holds every new term off until somebody resolves it")
	}
	return fmt.Errorf("pgfence: %s refused inside a guarded transaction: what follows it would run unguarded; return from fn instead", word)
}

// firstWord returns the first word of sql in upper case, and what follows it.
func firstWord(sql string) (word, rest string) {
	i := 0
	for i < len(sql) {
		switch {
		case sql[i] <= ' ':
			i++
		case strings.HasPrefix(sql[i:], "--"), strings.HasPrefix(sql[i:], "/*"):
			i += comment(sql[i:])
		default:
			j := i
			for j < len(sql) && (sql[j]|0x20 >= 'a' && sql[j]|0x20 <= 'z' || sql[j] == '_') {
				j++
			}
			return strings.ToUpper(sql[i:j]), sql[j:]
		}
	}
	return "", ""
}

// semicolon returns where the first statement of sql ends, -1 if with sql itself.
func semicolon(sql string) int {
	if strings.IndexByte(sql, ';') < 0 {
		return -1
	}
	for i := 0; i < len(sql); {
		switch c := sql[i]; {
		case c == ';':
			return i
		case c == '\'' || c == '"':
			escapes := c == '\'' && i > 0 && sql[i-1]|0x20 == 'e' && (i == 1 || !identifier(sql[i-2]))
			i += quoted(sql[i:], escapes)
		case strings.HasPrefix(sql[i:], "--"), strings.HasPrefix(sql[i:], "/*"):
			i += comment(sql[i:])
		case c == '$' && (i == 0 || !identifier(sql[i-1])):
			i += dollar(sql[i:])
		default:
			i++
		}
	}
	return -1
}

func identifier(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '$' || c >= 0x80
}

// comment, quoted and dollar return the length of what sql begins with; all of sql if it does not end.
func comment(sql string) int {
	if sql[1] == '-' {
		if i := strings.IndexAny(sql, "\r\n"); i >= 0 {
			return i
		}
		return len(sql)
	}
	depth := 0
	for i := 0; i+1 < len(sql); i++ {
		switch sql[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			depth--
			i++
			if depth == 0 {
				return i + 1
			}
		}
	}
	return len(sql)
}

func quoted(sql string, escapes bool) int {
	for i := 1; i < len(sql); i++ {
		switch {
		case escapes && sql[i] == '\\':
			i++
		case sql[i] == sql[0]:
			return i + 1 // of a doubled quote the second begins anew
		}
	}
	return len(sql)
}

func dollar(sql string) int {
	i := 1
	for i < len(sql) && identifier(sql[i]) && sql[i] != '$' {
		i++
	}
	if i == len(sql) || sql[i] != '$' || i > 1 && sql[1] >= '0' && sql[1] <= '9' {
		return 1 // a parameter such as $1
	}
	tag := sql[:i+1]
	if end := strings.Index(sql[i+1:], tag); end >= 0 {
		return i + 1 + end + len(tag)
	}
	return len(sql)
}

// literal quotes s for SQL, whatever standard_conforming_strings says.
func literal(s string) string {
	if !strings.Contains(s, `\`) {
		return "'" + strings.ReplaceAll(s, "'", "''") + "'"
	}
	return "E'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(s) + "'"
}
