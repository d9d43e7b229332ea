//! The result of a call.

use crate::replay::strace::{
    call::Ret,
    line::shorten,
    symbols::number,
    value::{Value, parse_list},
};

/// Decodes what follows the equals sign: `0x7fff`, `3</path>`, `-1 ENOMEM (...)`, `?`.
///
/// # Errors
/// It is none of these.
pub fn ret(text: &str) -> Result<Ret, String> {
    let text = text.trim();
    if text == "?" || text.starts_with("? ") {
        return Ok(Ret::Unknown);
    }
    let bad = || format!("no result of a call: {:?}", shorten(text));
    if let Some(error) = text.strip_prefix("-1 E") {
        let name = error
            .split(|c: char| !c.is_ascii_alphanumeric())
            .next()
            .unwrap_or(error);
        return errno(name)
            .map(Ret::Err)
            .ok_or_else(|| format!("an error that isn't known here: \"E{name}\""));
    }
    let (word, rest) = text.split_at(text.find(['<', ' ', '(']).unwrap_or(text.len()));
    let value = number(word).ok_or_else(bad)?;
    if !rest.starts_with('<') || word.contains('x') {
        return Ok(Ret::Ok {
            value,
            path: None,
            deleted: false,
        });
    }
    match parse_list(text.split(" <0.").next().unwrap_or(text))
        .map_err(|_| bad())?
        .as_slice()
    {
        [Value::Fd { path, deleted, .. }] => Ok(Ret::Ok {
            value,
            path: Some(path.clone()),
            deleted: *deleted,
        }),
        _ => Err(bad()),
    }
}

/// Linux's number of an error, named without its `E`.
fn errno(name: &str) -> Option<i32> {
    const NAMES: [&str; 41] = [
        "",
        "PERM",
        "NOENT",
        "SRCH",
        "INTR",
        "IO",
        "NXIO",
        "2BIG",
        "NOEXEC",
        "BADF",
        "CHILD",
        "AGAIN",
        "NOMEM",
        "ACCES",
        "FAULT",
        "NOTBLK",
        "BUSY",
        "EXIST",
        "XDEV",
        "NODEV",
        "NOTDIR",
        "ISDIR",
        "INVAL",
        "NFILE",
        "MFILE",
        "NOTTY",
        "TXTBSY",
        "FBIG",
        "NOSPC",
        "SPIPE",
        "ROFS",
        "MLINK",
        "PIPE",
        "DOM",
        "RANGE",
        "DEADLK",
        "NAMETOOLONG",
        "NOLCK",
        "NOSYS",
        "NOTEMPTY",
        "LOOP",
    ];
    const MORE: [(&str, i32); 8] = [
        ("WOULDBLOCK", 11),
        ("OVERFLOW", 75),
        ("OPNOTSUPP", 95),
        ("NOTSUPP", 95),
        ("IDRM", 43),
        ("USERS", 87),
        ("BADFD", 77),
        ("DQUOT", 122),
    ];
    if name.is_empty() {
        return None;
    }
    let plain = NAMES
        .iter()
        .position(|n| *n == name)
        .and_then(|i| i32::try_from(i).ok());
    plain.or_else(|| {
        MORE.iter()
            .find(|(n, _)| *n == name)
            .map(|&(_, number)| number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_decoded() {
        let value = |value| Ret::Ok {
            value,
            path: None,
            deleted: false,
        };
        assert_eq!(ret("0x7000"), Ok(value(0x7000)));
        assert_eq!(ret("0"), Ok(value(0)));
        assert_eq!(
            ret("0x40000 (PER_LINUX|ADDR_NO_RANDOMIZE)"),
            Ok(value(0x40000))
        );
        assert_eq!(ret("0 <0.000021>"), Ok(value(0)));
        assert_eq!(
            ret("3</memfd:a>(deleted)"),
            Ok(Ret::Ok {
                value: 3,
                path: Some("/memfd:a".into()),
                deleted: true
            })
        );
        assert_eq!(
            ret("3</a> <0.000021>"),
            Ok(Ret::Ok {
                value: 3,
                path: Some("/a".into()),
                deleted: false
            })
        );
        assert_eq!(ret("-1 ENOMEM (Cannot allocate memory)"), Ok(Ret::Err(12)));
        assert_eq!(ret("-1 EEXIST (File exists)"), Ok(Ret::Err(17)));
        assert_eq!(ret("-1 EOVERFLOW (x)"), Ok(Ret::Err(75)));
        assert_eq!(ret("? ERESTARTSYS (To be restarted)"), Ok(Ret::Unknown));
        for bad in ["", "x", "-1 EWHAT (x)", "-1 E", "3</a"] {
            assert!(ret(bad).is_err(), "{bad}");
        }
    }
}
